"""A step of decodes is prepared while the masks of the step before are awaited. One with drafts runs as a graph too.
Stand-ins for CUDA graphs run on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.api.text.tokenizer_files import TokenizerFiles
from lorafleet.protocol import structured_spec
from lorafleet.protocol.engine_config import EngineConfig, SpeculativeConfig
from lorafleet.protocol.messages import EngineRequest, TokenizerFile
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.attention.attention_backend import AttentionBatch
from lorafleet.workers.device.sampler import greedy_of_ranks
from lorafleet.workers.device.step_plan import StepPlan
from lorafleet.workers.device.unread_inputs import Corrections, UnreadInputs
from lorafleet.workers.engine import Engine
from lorafleet.workers.startup import build_engine
from lorafleet.workers.step.runner import ChosenStep
from lorafleet.workers.step.step_runner import StepRunner
from tests.workers.speculation.drafting import Guesses, speculate


@dataclass
class EagerGraph:
    num_rows: int
    is_filled: bool = False


class EagerGraphs:
    """Computes in replay() what a captured graph would."""

    def __init__(self, steps: StepRunner, calls: list[str]) -> None:
        self._steps = steps
        self._calls = calls
        self.found: list[tuple[int, int]] = []  # The rows and the sequences of each step.

    def find(self, lora_slots: list[int], context_lens: Sequence[int], *, may_shorten: bool) -> EagerGraph:  # noqa: ARG002  any graph does
        self.found.append((len(lora_slots), len(context_lens)))
        return EagerGraph(len(lora_slots))

    def fill(self, decode: EagerGraph, plan: StepPlan, unread: UnreadInputs | None) -> None:
        self._calls.append("fill" if unread is None or unread.token_N is not None else "fill before the tokens")
        inputs, batch, corrections = self._steps.inputs, plan.attention, None
        inputs.upload(plan.fields_FT, decode.num_rows)
        if unread is not None:
            if unread.short_B is not None:
                lens = (np.array(batch.context_lens) - unread.short_B.numpy()).tolist()
                batch = AttentionBatch(batch.query_lens, lens, batch.block_tables)
                corrections = Corrections(plan, self._steps._block_size, unread.most_short, inputs.block.device)
            inputs.correct(unread, corrections, decode.num_rows)
        self._steps._attention.plan(batch)
        decode.is_filled = True

    def replay(self, decode: EagerGraph, num_rows: int) -> tuple[Tensor, Tensor]:
        assert decode.is_filled and num_rows == decode.num_rows
        self._calls.append("replay")
        steps = self._steps
        hidden_BD = steps._run_model(steps.inputs.tensors(num_rows), None, None)
        logits_BW = steps.model.logits(hidden_BD)
        steps.inputs.sampled_B[:num_rows].copy_(greedy_of_ranks(logits_BW, steps.model.group))
        return hidden_BD, logits_BW


@pytest.fixture(scope="module")
def file(fleet) -> Iterator[TokenizerFile]:
    files, tokenizer = TokenizerFiles(), Tokenizer.from_folder(fleet("llama3").base)
    yield files.of(tokenizer)
    files.close()


@pytest.fixture
def engine(fleet) -> Iterator[Engine]:
    engine = build_engine(EngineConfig(str(fleet("llama3").base), kv_cache_tokens=1024, async_scheduling=True))
    yield engine
    engine.close()


def answers(engine: Engine, file: TokenizerFile, prompt: Any) -> dict[str, list[int]]:
    grammar = structured_spec.choice(["abcabcabcabcabc"], "x")
    for name, given in (("bound", grammar), ("also bound", grammar), ("free", None)):
        params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=given is None, structured_outputs=given)
        engine.add(EngineRequest(request_id=name, prompt_token_ids=prompt(7), params=params, tokenizer=file))
    tokens: dict[str, list[int]] = {"bound": [], "also bound": [], "free": []}
    while engine.num_unfinished:
        for output in engine.step():
            assert output.error is None
            tokens[output.request_id] += output.token_ids
    return tokens


def test_the_next_step_is_filled_before_the_masks_are_awaited(engine: Engine, file, prompt, monkeypatch) -> None:
    expected = answers(engine, file, prompt)
    calls: list[str] = []
    finish, steps = engine._structured.finish, engine.runner.steps
    steps.decode_graphs = EagerGraphs(steps, calls)  # type: ignore[assignment]  # a stand-in

    def await_masks() -> Any:
        calls.append("masks")
        return finish()

    monkeypatch.setattr(engine._structured, "finish", await_masks)
    assert answers(engine, file, prompt) == expected
    assert len(expected["bound"]) > 4
    ordered = " ".join(calls)
    assert "fill masks replay fill masks replay fill masks replay" in ordered
    assert ordered.count("fill") == ordered.count("replay")  # none is filled twice


def test_a_step_that_loses_a_sequence_after_it_was_prepared_is_filled_again(
    engine: Engine, file, prompt, monkeypatch
) -> None:
    expected = answers(engine, file, prompt)
    calls: list[str] = []
    steps, choose = engine.runner.steps, engine.pipeline.choose
    steps.decode_graphs = EagerGraphs(steps, calls)  # type: ignore[assignment]  # a stand-in

    def lose_one() -> Any:
        faults = choose()
        if calls.count("replay") == 3:
            engine.abort("also bound")
        return faults

    monkeypatch.setattr(engine.pipeline, "choose", lose_one)
    tokens = answers(engine, file, prompt)
    assert {name: tokens[name] for name in ("bound", "free")} == {name: expected[name] for name in ("bound", "free")}
    assert len(tokens["also bound"]) < len(expected["also bound"])
    assert calls.count("fill") == calls.count("replay") + 1


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_with_drafts_runs_as_a_graph_of_so_many_rows(fleet, prompt, overlap: bool, monkeypatch) -> None:
    config = EngineConfig(
        str(fleet("llama3").base),
        kv_cache_tokens=1024,
        max_num_seqs=4,
        speculative_config=SpeculativeConfig("ngram", num_speculative_tokens=3),
        async_scheduling=overlap,
    )
    engine = build_engine(config)
    steps, params = engine.runner.steps, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

    def all_answers() -> dict[str, list[int]]:
        tokens: dict[str, list[int]] = {"a": [], "b": []}
        for i, name in enumerate(tokens):
            engine.add(EngineRequest(request_id=name, prompt_token_ids=prompt(7 + i), params=params))
        while engine.num_unfinished:
            for output in engine.step():
                tokens[output.request_id] += output.token_ids
        return tokens

    expected = all_answers()
    calls: list[str] = []
    graphs = EagerGraphs(steps, calls)
    steps.decode_graphs = graphs  # type: ignore[assignment]  # a stand-in
    drawn = ChosenStep.drawn

    def await_tokens(step: ChosenStep) -> Any:
        calls.append("tokens")
        return drawn(step)

    monkeypatch.setattr(ChosenStep, "drawn", await_tokens)
    speculate(engine, Guesses(expected), most_tokens=3)
    assert all_answers() == expected
    assert (8, 2) in graphs.found
    assert len(graphs.found) < 12
    assert ("fill before the tokens tokens replay fill before the tokens tokens replay" in " ".join(calls)) == overlap
    assert calls.count("tokens") == calls.count("fill before the tokens")
    engine.close()
