"""Drafts of models with recurrent layers: a sequence goes on with the state behind its last accepted draft."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from family_cases import CASES, make_case, make_case_adapter
from lorafleet.offline.llm import SamplingParams
from lorafleet.protocol.engine_config import SpeculativeConfig
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.workers.device.draft_verification import DraftVerification
from lorafleet.workers.schedule.sequence import Sequence
from lorafleet.workers.schedule.state_slots import StateSlots
from lorafleet.workers.speculation.model_drafter import ModelDrafter
from ranks import start_llm
from stepped_engine import SteppedEngine
from tests.workers.speculation.drafting import Guesses, record, speculate

Prompt = Callable[[int], list[int]]
# Gated delta nets, Mamba-2 with attention beside it and in other layers, and short convolutions.
FAMILIES = ["qwen3_5", "falcon_h1", "nemotron_h", "lfm2"]
NUM_TOKENS = 90  # Enough for a snapshot within the answer.
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 3, "frequency_penalty": 0.5},
    {"temperature": 1.2, "seed": 4, "top_p": 0.9},
]


class Engines:
    """Two engines of a tiny model: one without drafts, and one whose drafts are the first one's answers, with
    mistakes."""

    def __init__(self, folder: Path, family: str, *, has_adapter: bool = True, **options: Any) -> None:
        base = make_case(folder / "base", CASES[family])
        options = {"max_num_seqs": 4, "speculative_config": SpeculativeConfig("ngram")} | options
        self.plain, self.drafted = SteppedEngine(base, **options), SteppedEngine(base, **options)
        self.plain.engine.scheduler.speculation = None
        speculate(self.drafted.engine, Guesses(self.plain.tokens))
        self._loras: dict[int, LoRARequest] = {}
        if has_adapter:
            adapter = make_case_adapter(folder / "adapter", base, CASES[family])
            self._loras = {id(stepped): stepped.load("a", adapter) for stepped in (self.plain, self.drafted)}

    def answers(self, stepped: SteppedEngine, jobs: dict[str, tuple[list[int], dict[str, Any]]]) -> list[list[int]]:
        for number, (name, (ids, params)) in enumerate(jobs.items()):
            given = {"max_tokens": NUM_TOKENS} | params
            stepped.add(name, ids, params=given, lora=self._loras.get(id(stepped)) if number % 2 else None)
        stepped.until(lambda: jobs.keys() <= stepped.ended.keys())
        return [stepped.tokens[name] for name in jobs]


def free_slots(stepped: SteppedEngine) -> list[int]:
    states = stepped.engine.scheduler.memory._states
    assert isinstance(states, StateSlots)
    return sorted(states._free)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_without_drafts(tmp_path: Path, prompt: Prompt, family: str) -> None:
    """Sequences are preempted, and take snapshots within their answers, from which other requests resume."""
    engines = Engines(tmp_path, family, kv_cache_tokens=384, state_snapshots=8, max_num_batched_tokens=48)
    jobs = {f"{i}": (prompt(length), KINDS[i % len(KINDS)]) for i, length in enumerate((20, 1, 33, 16, 40))}
    expected = engines.answers(engines.plain, jobs)
    assert engines.answers(engines.drafted, jobs) == expected
    steps = [stepped.engine.stats().steps_total for stepped in (engines.drafted, engines.plain)]
    assert steps[0] < 0.7 * steps[1]
    longer = {f"next {i}": ([*prompt(20), *expected[0]], KINDS[0]) for i in range(0, 3, 2)}
    assert engines.answers(engines.drafted, longer) == engines.answers(engines.plain, longer)
    drafted = engines.drafted.engine
    assert drafted.stats().prefix_cache_hits_total > 0
    assert drafted.stats().preemptions_total > 0
    assert free_slots(engines.drafted) == [*range(4), *drafted.runner.steps.states.draft_slots]


@pytest.fixture(scope="module")
def draft_model(fleet: Any) -> Path:
    """Returns the folder of a model that drafts for any of the tiny bases."""
    folder: Path = fleet("llama3").base
    return folder


class AheadEngine:
    """An engine of a tiny base, whose draft model drafts behind steps in flight. Its drafts are replaced there by the
    answers of an engine without drafts, with mistakes."""

    def __init__(self, base: Path, draft_model: Path, plain: SteppedEngine, **options: Any) -> None:
        config = SpeculativeConfig("draft_model", model=str(draft_model))
        options = {"max_num_seqs": 4, "async_scheduling": True, "lora": None} | options
        self.stepped = SteppedEngine(base, speculative_config=config, **options)
        self.behind: list[str] = []
        self.accepted = self.drafted = 0
        speculation = self.stepped.engine.scheduler.speculation
        assert speculation is not None and isinstance(speculation.drafter, ModelDrafter)
        speculate(self.stepped.engine, speculation.drafter)
        record(speculation.drafter, [], self.behind)
        propose, verified = speculation.drafter.propose_behind, self.stepped.engine.scheduler.speculation.verified
        rng = random.Random(3)

        @torch.inference_mode()
        def guessed(wanted: Any, step: DraftVerification) -> Any:
            made = propose(wanted, step)
            for sequence, row in made.row_by_sequence.items():
                rows = step.rows[sequence]
                first = len(sequence.tokens) - sequence.num_prompt + int(step.accepted_S[rows.index])
                answer = plain.tokens[sequence.request_id][first : first + made.counts[sequence]]
                for place, token in enumerate(answer):
                    made.token_WK[row, place] = 5 if rng.random() < 0.25 else token
            return made

        def counted(sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
            self.drafted, self.accepted = self.drafted + num_drafted, self.accepted + num_accepted
            verified(sequence, num_drafted, num_accepted)

        speculation.drafter.propose_behind = guessed  # type: ignore[method-assign]
        self.stepped.engine.scheduler.speculation.verified = counted  # type: ignore[method-assign]


@pytest.mark.parametrize("family", FAMILIES)
def test_states_go_on_behind_drafts_that_the_host_has_not_read(
    tmp_path: Path, prompt: Prompt, draft_model: Path, family: str
) -> None:
    check_states_behind(tmp_path, prompt, draft_model, family)


def check_states_behind(tmp_path: Path, prompt: Prompt, draft_model: Path, family: str, **options: Any) -> None:
    """Sequences are preempted, and their numbers of drafts change."""
    base = make_case(tmp_path / "base", CASES[family])
    room = {"kv_cache_tokens": 160, "state_snapshots": 8, "max_num_batched_tokens": 48} | options
    plain = SteppedEngine(base, max_num_seqs=4, lora=None, **room)
    ahead = AheadEngine(base, draft_model, plain, **room)
    jobs = {f"{i}": (prompt(length), KINDS[i % len(KINDS)]) for i, length in enumerate((20, 1, 33, 16))}
    for stepped in (plain, ahead.stepped):
        for name, (ids, params) in jobs.items():
            stepped.add(name, ids, params={"max_tokens": 36} | params)
        stepped.until(lambda stepped=stepped: jobs.keys() <= stepped.ended.keys())
    assert ahead.stepped.tokens == plain.tokens
    assert len(ahead.behind) > 10
    assert 0.1 * ahead.drafted < ahead.accepted < 0.9 * ahead.drafted
    assert ahead.stepped.engine.stats().preemptions_total > 0
    assert free_slots(ahead.stepped) == [*range(4), *ahead.stepped.engine.runner.steps.states.draft_slots]


def test_an_answer_with_drafts_takes_the_snapshot_that_it_takes_without(tmp_path: Path, prompt: Prompt) -> None:
    engines = Engines(tmp_path, "lfm2", state_snapshots=16)
    job = {"a": (prompt(20), KINDS[0])}
    [expected] = engines.answers(engines.plain, job)
    assert engines.answers(engines.drafted, job) == [expected]
    hits = []
    for stepped in (engines.plain, engines.drafted):
        before = stepped.engine.stats().prefix_cache_hits_total
        engines.answers(stepped, {"b": ([*prompt(20), *expected], KINDS[0])})
        hits.append(stepped.engine.stats().prefix_cache_hits_total - before)
    assert hits[0] == hits[1] > 20


def test_the_same_snapshot_is_taken_amid_drafts_that_the_host_has_not_read(
    tmp_path: Path, prompt: Prompt, draft_model: Path
) -> None:
    base, hits = make_case(tmp_path / "base", CASES["lfm2"]), []
    plain = SteppedEngine(base, max_num_seqs=4, lora=None, state_snapshots=16)
    ahead = AheadEngine(base, draft_model, plain, state_snapshots=16)
    for stepped in (plain, ahead.stepped):
        stepped.add("a", prompt(20), params={"max_tokens": NUM_TOKENS})
        stepped.until(lambda stepped=stepped: "a" in stepped.ended)
        before = stepped.engine.stats().prefix_cache_hits_total
        stepped.add("b", [*prompt(20), *plain.tokens["a"]])
        stepped.until(lambda stepped=stepped: "b" in stepped.ended)
        hits.append(stepped.engine.stats().prefix_cache_hits_total - before)
    assert ahead.stepped.tokens == plain.tokens
    assert hits[0] == hits[1] > 20
    assert len(ahead.behind) > 10


def test_an_abort_while_drafts_are_in_flight_gives_all_slots_back(tmp_path: Path, prompt: Prompt) -> None:
    engines = Engines(tmp_path, "lfm2", async_scheduling=True)
    engines.answers(engines.plain, {"a": (prompt(20), KINDS[0])})
    stepped = engines.drafted
    stepped.add("a", prompt(20), params={"max_tokens": NUM_TOKENS})
    [states] = [stepped.engine.scheduler.memory._states]
    stepped.until(lambda: any(sequence.draft_slots for sequence in stepped.engine.scheduler.running))
    stepped.engine.abort("a")
    stepped.until(lambda: not stepped.engine.has_work)
    assert len(free_slots(stepped)) == 4 + 16
    assert states is not None and states.take_for_drafts(99) and len(free_slots(stepped)) == 4


def test_two_ranks_keep_the_same_states(tmp_path: Path, prompt: Prompt) -> None:
    base = make_case(tmp_path / "base", CASES["qwen3_5"])
    llm = start_llm(str(base), 2, speculative_config={"method": "ngram"})
    params = [SamplingParams(**kind, max_tokens=24, ignore_eos=True) for kind in KINDS]
    jobs = [{"prompt_token_ids": prompt(length)} for length in (20, 1, 40)]

    def answers() -> list[list[int]]:
        return [output.outputs[0].token_ids for output in llm.generate(jobs, params)]

    llm._engine.scheduler.speculation = None
    expected, num_steps = answers(), llm._engine.stats().steps_total
    speculate(llm._engine, Guesses({f"{3 + i}-0": tokens for i, tokens in enumerate(expected)}))
    assert answers() == expected
    assert llm._engine.stats().steps_total - num_steps < 0.8 * num_steps
    llm.close()


def test_with_batch_invariance_logprobs_have_the_same_bits_with_drafts_and_without(
    tmp_path: Path, prompt: Prompt
) -> None:
    engines = Engines(tmp_path, "qwen3_5", batch_invariant=True)
    job = {"a": (prompt(20), {"temperature": 1.0, "seed": 5, "logprobs": 0, "max_tokens": 24})}
    assert engines.answers(engines.plain, job) == engines.answers(engines.drafted, job)
    found = [[entry.logprob for entry in stepped.logprobs["a"]] for stepped in (engines.plain, engines.drafted)]
    assert found[0] == found[1]


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_gpu_states_go_on_behind_drafts_that_the_host_has_not_read(
    tmp_path: Path, prompt: Prompt, draft_model: Path, family: str
) -> None:
    check_states_behind(
        tmp_path, prompt, draft_model, family, device="cuda", dtype="float32", attention_backend="triton"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_gpu_answers_in_float32_are_those_without_drafts(tmp_path: Path, prompt: Prompt, family: str) -> None:
    options = {"device": "cuda", "dtype": "float32", "attention_backend": "triton"}
    engines = Engines(tmp_path, family, has_adapter=False, max_num_batched_tokens=48, **options)
    graphs = engines.drafted.engine.runner.steps.decode_graphs
    assert graphs is not None and graphs.find([-1] * 3, [9]) is not None, "there are no graphs with drafts"
    jobs = {f"{i}": (prompt(length), KINDS[i % len(KINDS)]) for i, length in enumerate((20, 1, 33, 16, 40))}
    assert engines.answers(engines.plain, jobs) == engines.answers(engines.drafted, jobs)
    steps = [stepped.engine.stats().steps_total for stepped in (engines.drafted, engines.plain)]
    assert steps[0] < 0.7 * steps[1]
