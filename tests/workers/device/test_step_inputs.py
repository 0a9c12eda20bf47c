"""What the model is given for a step: of any mix of prompts and decodes, known tokens and ones still on the device."""

from __future__ import annotations

from dataclasses import replace

import torch

from lorafleet.kernels.lora.lora_batch import BASE_SLOT
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.device.step_inputs import StepInputs
from lorafleet.workers.device.step_plan import Rows
from lorafleet.workers.schedule.kv_cache import SequenceBlocks
from lorafleet.workers.schedule.sequence import UNKNOWN, Chunk, Sequence
from lorafleet.workers.slots.activation import NEVER
from lorafleet.workers.step.decode_columns import TokensBefore
from lorafleet.workers.step.planner import plan_step

BLOCK, TRASH = 4, 400


def chunk(name: str, tokens: list[int], num_computed: int, table: list[int], num_tokens: int) -> Chunk:
    blocks = SequenceBlocks(0, 0)
    blocks.table.extend(table)
    return Chunk(
        Sequence(name, tokens, 1, SamplingParams(), 0, 9, blocks=blocks, num_computed=num_computed), num_tokens
    )


def fields(inputs: StepInputs, chunks: list[Chunk], row_by_request: dict[str, int]) -> Rows:
    return plan_step(chunks, TokensBefore(row_by_request), inputs.first_known, BLOCK, []).fields_FT


def test_tokens_come_from_the_host_or_from_the_last_step_and_padding_goes_to_the_trash():
    inputs = StepInputs(8, 32, TRASH, torch.device("cpu"))
    inputs.sampled_B[:3] = torch.tensor([71, 72, 73])
    chunks = [
        chunk("decode", [5, 6, 7, 8, 9, UNKNOWN], 5, [20, 30], 1),
        chunk("prompt", list(range(100, 120)), 3, [1, 9, 5], 7),
        chunk("known", [5, 6], 1, [2], 1),
        chunk("prompt whose answer began", [50, 51, 52, UNKNOWN], 1, [8], 3),
    ]
    inputs.upload(fields(inputs, chunks, {"decode": 2, "prompt whose answer began": 0}), 14)
    found = inputs.tensors(14)
    assert found.tokens().tolist() == [73, *range(103, 110), 6, 51, 52, 71, 0, 0]
    assert found.position_T.tolist() == [5, *range(3, 10), 1, 1, 2, 3, 0, 0]
    assert found.rope_length_T.tolist() == [6, *range(4, 11), 2, 2, 3, 4, 1, 1]
    prompt = [1 * 4 + 3, *(9 * 4 + i for i in range(4)), 5 * 4, 5 * 4 + 1]
    assert found.kv_slot_T.tolist() == [30 * 4 + 1, *prompt, 9, 33, 34, 35, TRASH, TRASH]


def test_drafts_follow_their_sequence_s_last_token_and_a_token_is_chosen_behind_each():
    inputs = StepInputs(8, 32, TRASH, torch.device("cpu"))
    chunks = [
        chunk("plain", [5, 6, 7], 2, [20], 1),
        replace(chunk("drafted", [*range(10, 20)], 9, [1, 2, 3, 7], 4), drafts=[30, 31, 32]),
        chunk("prompt", list(range(100, 120)), 3, [1, 9, 5], 7),
    ]
    plan = plan_step(chunks, TokensBefore({}), inputs.first_known, BLOCK, [])
    assert plan.sampling == [0, 1, 2, 3, 4], "the prompt does not end"
    assert not plan.is_decode
    inputs.upload(plan.fields_FT, 12)
    found = inputs.tensors(12)
    assert found.tokens().tolist()[:6] == [7, 19, 30, 31, 32, 103]
    assert found.position_T.tolist()[1:5] == [9, 10, 11, 12]
    assert found.kv_slot_T.tolist()[1:5] == [3 * 4 + 1, 3 * 4 + 2, 3 * 4 + 3, 7 * 4]


def test_a_smaller_step_leaves_nothing_of_the_one_before():
    inputs = StepInputs(2, 32, TRASH, torch.device("cpu"))
    inputs.upload(fields(inputs, [chunk("long", list(range(20)), 0, [0, 1, 2, 3, 4], 20)], {}), 24)
    inputs.upload(fields(inputs, [chunk("short", [3, 4], 0, [6], 2)], {}), 4)
    assert inputs.tensors(4).tokens().tolist() == [3, 4, 0, 0]
    assert inputs.tensors(4).kv_slot_T.tolist() == [24, 25, TRASH, TRASH]


def test_tokens_before_an_activated_adapter_begins_use_the_base():
    def slots(num_computed: int, num_tokens: int, first_adapted: int) -> tuple[list[int], list[int]]:
        one = chunk("one", list(range(20)), num_computed, [0, 1, 2, 3, 4], num_tokens)
        one.sequence.slot, one.sequence.first_adapted = 3, first_adapted
        plan = plan_step([one], TokensBefore({}), 8, BLOCK, [])
        return plan.slots, plan.lora_slots

    assert slots(0, 6, 0) == ([3], [3] * 6)
    assert slots(0, 6, 4) == ([3], [BASE_SLOT] * 4 + [3] * 2)
    assert slots(4, 6, 6) == ([3], [BASE_SLOT] * 2 + [3] * 4)
    assert slots(4, 2, 6) == ([BASE_SLOT], [BASE_SLOT] * 2)
    assert slots(19, 1, 6) == ([3], [3])
    assert slots(19, 1, NEVER) == ([BASE_SLOT], [BASE_SLOT])
