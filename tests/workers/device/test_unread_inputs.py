"""The device corrects a step that was planned before the lengths of its sequences were known. The result is the plan
that the host would have made with them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from endless_download import EndlessDownload
from lorafleet.kernels.recurrent.recurrent_batch import RecurrentBatch
from lorafleet.protocol.errors import EngineDead
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.attention.attention_backend import AttentionSpec, DraftRows, KVCache, LayerAttention
from lorafleet.workers.attention.triton_decodes import CapturedDecodes, DecodeLayers
from lorafleet.workers.device import unread_inputs
from lorafleet.workers.device.step_inputs import StepInputs
from lorafleet.workers.device.step_plan import StepPlan
from lorafleet.workers.device.unread_inputs import Corrections, UnreadInputs
from lorafleet.workers.schedule.kv_cache import SequenceBlocks
from lorafleet.workers.schedule.sequence import UNKNOWN, Chunk, Sequence
from lorafleet.workers.step.decode_columns import TokensBefore
from lorafleet.workers.step.planner import plan_step

BLOCK, TRASH, ROWS = 4, 400, 16
CPU = torch.device("cpu")


def chunk(name: str, num_computed: int, table: list[int], in_flight: int, drafts: int) -> Chunk:
    """Returns the chunk of a sequence with so many drafts in flight and in this step."""
    blocks = SequenceBlocks(0, 0)
    blocks.table.extend(table)
    tokens = [*range(50, 50 + num_computed), UNKNOWN]
    made = Sequence(name, tokens, 1, SamplingParams(), 0, 99, blocks=blocks, num_computed=num_computed)
    made.num_unverified = in_flight
    return Chunk(made, 1 + drafts, drafts=[UNKNOWN] * drafts)


def planned(in_flight: tuple[int, ...]) -> StepPlan:
    """Returns the plan of three sequences, with a first one without drafts."""
    chunks = [
        chunk("plain", 6, [3, 9, 4], in_flight[0], 0),
        chunk("drafted", 2, [7, 1, 8, 2, 5], in_flight[1], 3),
        chunk("long", 17, [20, 21, 22, 23, 24, 25, 26], in_flight[2], 2),
    ]
    return plan_step(chunks, TokensBefore(dict.fromkeys(("plain", "drafted", "long"), 0)), ROWS, BLOCK, [])


@pytest.mark.parametrize("short", [(0, 0, 0), (1, 0, 4), (3, 4, 2), (3, 4, 4)])
def test_inputs_are_those_of_the_known_lengths(short: tuple[int, ...]) -> None:
    plan, num_rows = planned((3, 4, 4)), 8
    tokens = torch.arange(100, 108)
    unread = UnreadInputs(torch.arange(8), tokens, torch.tensor(short), most_short=4)
    known = planned(tuple(most - less for most, less in zip((3, 4, 4), short, strict=True)))
    corrected = StepInputs(ROWS, 32, TRASH, CPU)
    corrected.upload(plan.fields_FT, num_rows + 2)
    corrected.correct(unread, Corrections(plan, BLOCK, 4, CPU), num_rows + 2)
    found = corrected.tensors(num_rows + 2)
    assert found.tokens().tolist() == [*tokens.tolist(), 0, 0]
    assert corrected.known_tokens(8).tolist() == tokens.tolist()
    for field, values_T in ((2, found.position_T), (3, found.rope_length_T), (4, found.kv_slot_T)):
        assert values_T[:8].tolist() == known.fields_FT[field].tolist()
    assert found.kv_slot_T[8:].tolist() == [TRASH, TRASH]
    on_host = unread.with_known(plan, ROWS, BLOCK)
    assert np.array_equal(on_host.fields_FT[1:], np.stack((np.arange(ROWS, ROWS + 8), *known.fields_FT[2:])))
    assert on_host.fields_FT[0].tolist() == tokens.tolist()
    assert on_host.attention == known.attention


def test_a_wait_for_what_is_lacking_ends_if_a_rank_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        raise EngineDead("rank 1 is gone")

    monkeypatch.setattr(unread_inputs, "Download", EndlessDownload)
    plan = plan_step([chunk("plain", 6, [3, 9, 4], 0, 1)], TokensBefore({"plain": 0}), ROWS, BLOCK, [])
    unread = UnreadInputs(torch.arange(1), torch.arange(1))
    with pytest.raises(EngineDead):
        unread.with_known(plan, ROWS, BLOCK, check)


@pytest.mark.parametrize("short", range(4))
def test_states_go_on_in_the_slots_of_the_known_lengths(short: int) -> None:
    """The second sequence has three drafts in flight and two in this step; the third two, and four in this step."""
    chunks = [
        chunk("plain", 6, [3, 9, 4], 0, 1),
        chunk("fewer", 2, [7, 1, 8, 2, 5], 3, 2),
        chunk("more", 17, [20, 21, 22, 23, 24, 25, 26], 2, 4),
    ]
    slots = [(0, [30], []), (12, [10, 11], [10, 11, 14, 12]), (22, [20, 21, 40, 41], [20, 21, 22])]
    for made, (own, drafts, ring) in zip(chunks, slots, strict=True):
        made.sequence.state_slot, made.sequence.draft_slots, made.sequence.state_ring = own, drafts, ring
    plan = plan_step(chunks, TokensBefore(dict.fromkeys(("plain", "fewer", "more"), 0)), ROWS, BLOCK, [])
    lens = [0, short, min(short, 2)]
    unread = UnreadInputs(torch.arange(10), torch.arange(10), torch.tensor(lens), most_short=3)
    known = unread.with_known(plan, ROWS, BLOCK)
    second = [(12, [10, 11]), (14, [12, 10]), (11, [14, 12]), (10, [11, 14])][short]
    third = [(22, [20, 21]), (21, [22, 20]), (20, [21, 22]), (20, [21, 22])][short]
    assert known.state_slots == [0, second[0], third[0]]
    assert known.kept_states == [30, -1, *second[1], -1, *third[1], 40, 41, -1]
    assert not known.state_rings
    batch = RecurrentBatch.of_drafts(12, 4, 50, CPU)
    batch.refill(plan.attention.query_lens, plan.state_slots, plan.begins, 50, plan.kept_states)
    assert unread.short_B is not None
    slot_N = Corrections(plan, BLOCK, 3, CPU).known_state_slots(unread.short_B)
    assert slot_N is not None
    batch.correct(slot_N, len(chunks))
    assert batch.slot_B.tolist()[:4] == [*known.state_slots, 50]
    assert batch.kept_T is not None and batch.kept_T.tolist() == [*known.kept_states, -1, -1]


@pytest.mark.parametrize("window", [None, 5])
def test_captured_attention_sees_the_keys_of_the_known_lengths(window: int | None) -> None:
    layer = LayerAttention(2, 1, 16, 1.0, window=window)
    spec = AttentionSpec((layer,), BLOCK, torch.float32, torch.float32, CPU)
    cache = torch.zeros(30, BLOCK, 1, 16)
    captured = CapturedDecodes(DecodeLayers.of(spec, [KVCache(cache, cache)])).for_graph(3, 64, DraftRows(5, 8))
    plan, short = planned((3, 4, 4)), torch.tensor([3, 0, 2])
    captured.plan(replace(plan.attention, most_shorter=4))
    captured.shorten(short)
    [batch] = captured._batches
    assert batch.rows_B3 is not None
    assert batch.rows_B3.tolist() == [[0, 1, 7], [1, 4, 10], [5, 3, 22]]
    for span in batch.spans_S5.tolist()[:3]:
        _, count, length = batch.rows_B3[span[0]].tolist()
        assert span[1] <= max(0, 0 if window is None else length - count + 1 - window) and span[2] >= length
