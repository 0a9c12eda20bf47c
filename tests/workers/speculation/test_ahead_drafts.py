"""Drafts of a model follow a step in flight, so that steps with drafts overlap. No answer changes."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lorafleet.protocol.engine_config import SpeculativeConfig
from lorafleet.protocol.engine_control import (
    FlushPrefixes,
    PauseEngine,
    ResumeEngine,
    SleepEngine,
    SupersedeAdapter,
    WakeEngine,
)
from lorafleet.workers.schedule.kv_cache import KVCacheManager
from lorafleet.workers.speculation.model_drafter import ModelDrafter
from stepped_engine import SteppedEngine
from tests.workers.speculation.drafting import speculate

LENGTH = 40


class DraftingEngine:
    """An engine with a draft model, and what it has drafted."""

    def __init__(self, base: Path, draft: Path, **options: Any) -> None:
        config = SpeculativeConfig("draft_model", model=str(draft))
        self.stepped = SteppedEngine(base, **({"speculative_config": config, "async_scheduling": True} | options))
        speculation = self.stepped.engine.scheduler.speculation
        assert speculation is not None and isinstance(speculation.drafter, ModelDrafter)
        self.drafter = speculation.drafter
        speculate(self.stepped.engine, self.drafter)
        self.behind = 0  # Tokens that were drafted behind a step in flight.
        self.accepted = self.drafted = 0
        propose, step = self.drafter.propose_behind, self.stepped.engine.step

        def proposed(*args: Any) -> Any:
            made = propose(*args)
            self.behind += sum(made.counts.values())
            return made

        def stepped() -> Any:
            outputs = step()
            for output in outputs:
                if output.drafts is not None:
                    self.drafted += output.drafts.num_tokens
                    self.accepted += output.drafts.num_accepted
            return outputs

        self.drafter.propose_behind = proposed  # type: ignore[method-assign]
        self.stepped.engine.step = stepped  # type: ignore[method-assign]

    def assert_is_empty(self) -> None:
        self.stepped.until(lambda: not self.stepped.engine.has_work)  # A step may be in flight behind the last answer.
        kv, stats = self.drafter.kv, self.stepped.engine.stats()
        assert kv.num_free == kv.num_blocks and not self.drafter._followed
        assert stats.kv_blocks_free == stats.kv_blocks_total


def answers(stepped: SteppedEngine, prompts: dict[str, list[int]], **params: Any) -> dict[str, list[int]]:
    for name, ids in prompts.items():
        stepped.add(name, ids, params={"max_tokens": LENGTH} | params)
    stepped.until(lambda: prompts.keys() <= stepped.ended.keys())
    return {name: stepped.tokens[name] for name in prompts}


@pytest.fixture(scope="module")
def near(fleet: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a model whose likeliest tokens are often those of the base, and often not."""
    folder = tmp_path_factory.mktemp("near") / "near"
    shutil.copytree(fleet("llama3").base, folder)
    [file] = folder.glob("*.safetensors")
    torch.manual_seed(0)
    noisy = {
        name: w + 0.03 * w.std() * torch.randn_like(w) if w.ndim == 2 else w for name, w in load_file(file).items()
    }
    save_file(noisy, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("params", [{}, {"temperature": 0.2, "seed": 3, "top_p": 0.9}])
def test_answers_and_the_share_of_right_drafts_are_those_of_steps_that_wait(fleet, prompt, near, params) -> None:
    base = fleet("llama3").base
    prompts = {"a": prompt(20), "b": prompt(35), "c": prompt(7)}
    expected = answers(SteppedEngine(base), prompts, **params)
    ahead, waiting = DraftingEngine(base, near), DraftingEngine(base, near, async_scheduling=False)
    assert answers(ahead.stepped, prompts, **params) == expected == answers(waiting.stepped, prompts, **params)
    ahead.assert_is_empty()
    assert waiting.behind == 0
    assert ahead.behind > 0.8 * ahead.drafted
    assert 0.2 * ahead.drafted < ahead.accepted < 0.9 * ahead.drafted
    assert abs(ahead.accepted / ahead.drafted - waiting.accepted / waiting.drafted) < 0.15


class Copied:
    """An event at the end of a step's copies out of pinned memory. The device may be as late as it can: it has done
    nothing of a step before the host has read the tokens of that step."""

    def __init__(self, turns: list[None]) -> None:
        self._turns = turns  # One for each step of the engine so far.
        self._recorded: int | None = None

    def record(self) -> None:
        self._recorded = len(self._turns)

    def synchronize(self) -> None:
        # The tokens of a step that is launched in one turn are read at the end of the next.
        assert self._recorded is None or len(self._turns) - self._recorded > 1, "the host waits for a step in flight"


def test_no_step_waits_until_the_device_has_copied_the_inputs_of_those_in_flight(fleet, prompt, near) -> None:
    """With several ranks, the device copies them when all have made the drafts before. If one is gone, it never does,
    and nothing ends this wait."""
    drafting, turns = DraftingEngine(fleet("llama3").base, near), list[None]()
    engine = drafting.stepped.engine
    for inputs in (engine.runner.steps.inputs, drafting.drafter.steps.inputs):
        inputs._copied = [Copied(turns) for _ in inputs._hosts]  # type: ignore[misc]  # stands for CUDA's event
    step = engine.step

    def stepped() -> Any:
        turns.append(None)
        return step()

    engine.step = stepped  # type: ignore[method-assign]
    answers(drafting.stepped, {"a": prompt(20), "b": prompt(35), "c": prompt(7)})
    assert drafting.behind > 40


EDITS: list[dict[str, Any]] = [
    {"frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"repetition_penalty": 1.2, "temperature": 0.3, "seed": 5},
    {"logit_bias": {7: 2.0, 50: -3.0}, "min_tokens": 30, "stop_token_ids": list(range(40, 200))},
    {"min_tokens": 13, "stop_token_ids": list(range(40, 300)), "temperature": 0.2, "seed": 6, "logprobs": 1},
    {"allowed_token_ids": list(range(30, 90)), "repetition_penalty": 1.1},
    {},
]


def test_edited_logits_do_not_wait_and_see_the_tokens_that_the_host_does_not_know(fleet, prompt, near) -> None:
    check_edits(fleet("llama3").base, prompt, near)


@pytest.mark.gpu
def test_on_a_gpu_edited_logits_do_not_wait(fleet, prompt, near) -> None:
    options = {"device": "cuda", "dtype": "float32", "attention_backend": "triton", "lora": None}
    check_edits(fleet("llama3").base, prompt, near, **options)


def check_edits(base: Path, prompt: Any, near: Path, **options: Any) -> None:
    """One answer may not contain the pairs and triples of tokens that it would have, of which drafts are full."""
    plain = SteppedEngine(base, **options)
    usual = answers(plain, {"usual": prompt(11)})["usual"]
    banned = [usual[i : i + count] for count, i in ((2, 3), (3, 5), (2, 8), (3, 11), (4, 14), (1, 20))]
    jobs = [(prompt(11 + i), kind) for i, kind in enumerate(EDITS)] + [(prompt(11), {"bad_words_token_ids": banned})]
    drafting = DraftingEngine(base, near, **options)
    for stepped in (plain, drafting.stepped):
        stepped.tokens, stepped.ended = {}, {}
        for i, (ids, params) in enumerate(jobs):
            stepped.add(f"{i}", ids, params={"max_tokens": LENGTH} | params)
        stepped.until(lambda stepped=stepped: len(stepped.ended) == len(jobs))
    assert drafting.stepped.tokens == plain.tokens and drafting.stepped.ended == plain.ended
    assert plain.tokens["6"] != usual and len(plain.tokens["3"]) < LENGTH
    assert drafting.behind > 0.8 * drafting.drafted
    assert 0.1 * drafting.drafted < drafting.accepted < 0.9 * drafting.drafted
    drafting.assert_is_empty()


def test_requests_of_many_kinds_come_and_end_all_the_time(fleet, prompt, near) -> None:
    """Answers end by their length and by stop tokens, amid drafts and behind them. Some find a prefix in the cache."""
    made, rng = fleet("llama3"), random.Random(3)
    kinds: list[dict[str, Any]] = [
        {},
        {"stop_token_ids": list(range(40, 90))},
        {"temperature": 0.3, "seed": 4, "top_k": 20},
        {"temperature": 0.2, "seed": 5, "stop_token_ids": list(range(200, 260))},
        {"logprobs": 1},
        {"frequency_penalty": 0.3, "min_tokens": 1, "stop_token_ids": list(range(100, 160))},
    ]
    jobs: list[tuple[list[int], dict[str, Any], str | None]] = [
        (prompt(rng.choice((3, 20, 33))), rng.choice(kinds) | {"max_tokens": rng.randrange(1, 40)}, name)
        for name in (None, "all", None, "qv") * 8
    ]
    found = []
    room = {"max_num_batched_tokens": 64, "max_num_seqs": 5}
    drafting = DraftingEngine(made.base, near, **room)
    for stepped in (SteppedEngine(made.base, **room), drafting.stepped):
        loras = {name: stepped.load(name, made.adapters[name]) for name in ("all", "qv")}
        for i, (ids, params, name) in enumerate(jobs):
            stepped.add(f"{i}", ids, None if name is None else loras[name], params=params)
            for _ in range(i % 5):
                stepped.step()
        stepped.until(lambda stepped=stepped: len(stepped.ended) == len(jobs))
        found.append((stepped.tokens, stepped.ended))
    assert found[0] == found[1]
    assert drafting.behind > 40
    assert 0 < drafting.accepted < drafting.drafted
    drafting.assert_is_empty()


def test_sequences_are_preempted_as_without_drafts(fleet, prompt, near) -> None:
    """The cache has no room for all answers, and the step in flight may end with more tokens than the host knows."""
    base = fleet("llama3").base
    room: dict[str, Any] = {"kv_cache_tokens": 144, "max_model_len": 64, "enable_prefix_caching": False}
    prompts = {name: prompt(10 + i) for i, name in enumerate("abcd")}
    drafting = DraftingEngine(base, near, **room)
    assert answers(drafting.stepped, prompts) == answers(SteppedEngine(base, **room), prompts)
    assert drafting.stepped.engine.stats().preemptions_total > 0
    assert drafting.behind > 20
    drafting.assert_is_empty()


def test_an_abort_while_the_next_drafts_are_in_flight_changes_no_other_answer(fleet, prompt, near) -> None:
    base = fleet("llama3").base
    prompts = {name: prompt(20 + i) for i, name in enumerate("abc")}
    expected = answers(SteppedEngine(base), prompts)
    drafting = DraftingEngine(base, near)
    stepped = drafting.stepped
    for name, ids in prompts.items():
        stepped.add(name, ids, params={"max_tokens": LENGTH})
    stepped.until(lambda: drafting.behind > 20)
    stepped.engine.abort("b")
    stepped.until(lambda: {"a", "c"} <= stepped.ended.keys())
    assert {name: stepped.tokens[name] for name in "ac"} == {name: expected[name] for name in "ac"}
    assert "b" not in stepped.ended
    while stepped.engine.has_work:
        stepped.step()
    drafting.assert_is_empty()


@pytest.mark.parametrize("order", ["sleep", "sleep at level 2", "pause", "flush"])
def test_an_order_amid_drafts_in_flight_changes_no_answer(fleet, prompt, near, order) -> None:
    base = fleet("llama3").base
    prompts = {name: prompt(20 + i) for i, name in enumerate("abc")}
    expected = answers(SteppedEngine(base), prompts)
    drafting = DraftingEngine(base, near)
    stepped = drafting.stepped
    for name, ids in prompts.items():
        stepped.add(name, ids, params={"max_tokens": LENGTH})
    for _ in range(3):
        before = drafting.behind
        stepped.until(lambda before=before: drafting.behind > before)
        assert stepped.engine.pipeline.verification is not None
        if order == "flush":
            stepped.order(FlushPrefixes())
        elif order == "pause":
            stepped.order(PauseEngine("keep"))
            stepped.order(ResumeEngine())
        else:
            stepped.order(SleepEngine(2 if "2" in order else 1, mode="keep"))
            stepped.order(WakeEngine())
    stepped.until(lambda: prompts.keys() <= stepped.ended.keys())
    assert {name: stepped.tokens[name] for name in prompts} == expected
    assert 0 < drafting.accepted < drafting.drafted
    drafting.assert_is_empty()


def test_an_adapter_is_superseded_amid_drafts_in_flight(fleet, prompt, near) -> None:
    """The new version goes on behind the last token that the former one has drawn."""
    made = fleet("llama3")
    drafting, plain = DraftingEngine(made.base, near), SteppedEngine(made.base)
    for stepped in (drafting.stepped, plain):
        former = stepped.load("pushed", made.adapters["all"])
        new = stepped.load("pushed", made.adapters["qv"], version=2)
        stepped.add("a", prompt(20), former, params={"max_tokens": LENGTH})
        if stepped is plain:
            [switch] = drafting.stepped.switches["a"]
            stepped.until(lambda start=switch.start: len(plain.tokens.get("a", ())) == start)
        else:
            stepped.until(lambda: drafting.behind > 4)
            assert stepped.engine.pipeline.verification is not None
        stepped.order(SupersedeAdapter(new, aborts=False))
        stepped.until(lambda stepped=stepped: "a" in stepped.ended)
    assert drafting.stepped.tokens == plain.tokens and drafting.stepped.switches == plain.switches
    drafting.assert_is_empty()


def test_a_later_request_finds_the_blocks_of_accepted_drafts_and_those_alone(fleet, prompt, near) -> None:
    base = fleet("llama3").base
    drafting, plain = DraftingEngine(base, near), SteppedEngine(base)
    first = answers(drafting.stepped, {"a": prompt(20)})["a"]
    longer = [*prompt(20), *first]
    hits = drafting.stepped.engine.stats().prefix_cache_hits_total
    assert answers(drafting.stepped, {"b": longer}) == answers(plain, {"b": longer})
    assert drafting.stepped.engine.stats().prefix_cache_hits_total - hits == 48
    assert drafting.drafter.kv.counts.hit_tokens == 48
    drafting.assert_is_empty()


def test_draft_loras_of_several_adapters_draft_behind_a_step_in_flight(fleet, prompt, tmp_path) -> None:
    """Each adapter is its own draft LoRA, and the base its own draft model. So every draft is right."""
    made = fleet("llama3")
    drafting, plain = DraftingEngine(made.base, made.base), SteppedEngine(made.base)
    for name in ("all", "qv"):
        shutil.copytree(made.adapters[name], tmp_path / name)
        shutil.copytree(made.adapters[name], tmp_path / name / "draft")
    for stepped in (drafting.stepped, plain):
        for i, name in enumerate(("all", "qv")):
            stepped.add(name, prompt(20 + i), stepped.load(name, tmp_path / name), params={"max_tokens": LENGTH})
        stepped.add("base", prompt(9), params={"max_tokens": LENGTH})
        stepped.until(lambda stepped=stepped: len(stepped.ended) == 3)
    assert drafting.stepped.tokens == plain.tokens
    assert drafting.accepted == drafting.drafted > 60
    assert drafting.behind > 0.8 * drafting.drafted


def test_a_draft_lora_that_arrives_between_the_choice_and_its_drafts_is_computed_from_the_first_token(
    fleet, prompt, tmp_path
) -> None:
    """The draft model has computed the sequence without the draft LoRA. Nobody may find that in its prefix cache."""
    made = fleet("llama3")
    drafting, plain = DraftingEngine(made.base, made.base), SteppedEngine(made.base)
    shutil.copytree(made.adapters["all"], tmp_path / "all")
    shutil.copytree(made.adapters["all"], tmp_path / "all" / "draft")
    assert drafting.drafter.slots is not None
    find, propose, arrived = drafting.drafter.slots.find, drafting.drafter.propose_behind, list[bool]()

    def propose_behind(*args: Any) -> Any:
        arrived.append(True)
        return propose(*args)

    drafting.drafter.slots.find = lambda *args: find(*args) if arrived else None  # type: ignore[method-assign]
    drafting.drafter.propose_behind = propose_behind  # type: ignore[method-assign]
    for stepped in (drafting.stepped, plain):
        lora = stepped.load("all", tmp_path / "all")
        for name in ("first", "second"):
            drafting.accepted = drafting.drafted = 0
            stepped.add(name, prompt(40), lora, params={"max_tokens": LENGTH})
            stepped.until(lambda stepped=stepped, name=name: name in stepped.ended)
            assert stepped is plain or name == "first" or drafting.accepted == drafting.drafted > 20
    assert drafting.stepped.tokens == plain.tokens


def test_a_draft_model_without_room_for_a_sequence_drafts_for_the_others(fleet, prompt, near) -> None:
    base = fleet("llama3").base
    prompts = {"a": prompt(20), "b": prompt(35), "c": prompt(7)}
    drafting = DraftingEngine(base, near)
    drafting.drafter.kv = KVCacheManager(6, 16, enable_prefix_caching=True)
    assert answers(drafting.stepped, prompts) == answers(SteppedEngine(base), prompts)
    assert drafting.behind > 0.6 * drafting.drafted, "nobody waits for a sequence without room"
    drafting.assert_is_empty()


def test_with_batch_invariance_drafts_follow_a_step_in_flight_too(fleet, prompt, near) -> None:
    base = fleet("llama3").base
    prompts = {"a": prompt(20), "b": prompt(9)}
    drafting = DraftingEngine(base, near, batch_invariant=True)
    plain = SteppedEngine(base, batch_invariant=True)
    assert answers(drafting.stepped, prompts, max_tokens=24) == answers(plain, prompts, max_tokens=24)
    assert drafting.behind > 10
