"""An engine that verifies drafts: its steps, what it counts, what it leaves behind, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from lorafleet.protocol.engine_config import SpeculativeConfig
from lorafleet.protocol.errors import ConfigError
from lorafleet.protocol.messages import TokenOutput
from lorafleet.workers.speculation.ngram_drafter import NgramDrafter
from lorafleet.workers.speculation.speculation import Speculation
from stepped_engine import SteppedEngine
from tests.workers.speculation.drafting import DraftsCost, Guesses, speculate
from tiny_models import make_model

NGRAM = SpeculativeConfig("ngram")


def made_engine(fleet: Any, expected: list[int] | None = None, **options: Any) -> SteppedEngine:
    """Returns an engine that drafts `expected` for every request, without mistakes, or that drafts nothing."""
    stepped = SteppedEngine(fleet("llama3").base, **({"speculative_config": NGRAM} | options))
    if expected is None:
        stepped.engine.scheduler.speculation = None
    else:
        speculate(stepped.engine, Guesses(dict.fromkeys(("a", "b", "c"), expected), mistakes=0.0))
    return stepped


def answer(stepped: SteppedEngine, name: str, ids: list[int], **fields: Any) -> list[int]:
    stepped.add(name, ids, **fields)
    stepped.until(lambda: name in stepped.ended)
    return stepped.tokens[name]


@pytest.fixture(scope="module")
def plain(fleet: Any, prompt: Callable[[int], list[int]]) -> list[int]:
    """Returns the 50 tokens that follow prompt(20) without drafts."""
    return answer(made_engine(fleet), "a", prompt(20), params={"max_tokens": 50})


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_gives_all_tokens_of_a_draft_that_is_right_and_one_more(fleet, prompt, plain, overlap) -> None:
    stepped = made_engine(fleet, plain, async_scheduling=overlap)
    outputs: list[TokenOutput] = []
    step = stepped.engine.step

    def recorded() -> list[TokenOutput]:
        found = step()
        outputs.extend(found)
        return found

    stepped.engine.step = recorded  # type: ignore[method-assign]
    assert answer(stepped, "a", prompt(20), params={"max_tokens": 50, "logprobs": 1}) == plain
    assert len(stepped.logprobs["a"]) == 50
    assert [entry.token_id for entry in stepped.logprobs["a"]] == plain
    lengths = [len(output.token_ids) for output in outputs]
    assert max(lengths) == 5 and len(lengths) < 20
    drafts = [output.drafts for output in outputs if output.drafts is not None]
    assert sum(counts.num_accepted for counts in drafts) == sum(counts.num_tokens for counts in drafts) > 30
    stats = stepped.engine.stats()
    assert stats.generation_tokens_total == 50
    assert stats.kv_blocks_free == stats.kv_blocks_total


def test_a_stop_token_within_a_draft_ends_the_answer_there(fleet, prompt, plain) -> None:
    stop = plain[9]
    first = plain.index(stop)
    stepped = made_engine(fleet, plain)
    params = {"max_tokens": 50, "stop_token_ids": [stop]}
    assert answer(stepped, "a", prompt(20), params=params) == plain[: first + 1]
    assert stepped.ended["a"] == "stop"
    params |= {"min_tokens": first + 3}
    assert answer(stepped, "b", prompt(20), params=params)[: first + 1] != plain[: first + 1]
    assert stepped.engine.stats().kv_blocks_free == stepped.engine.stats().kv_blocks_total


@pytest.mark.parametrize("overlap", [False, True])
def test_a_later_request_finds_the_blocks_of_accepted_drafts_and_those_alone(fleet, prompt, plain, overlap) -> None:
    """What wrong drafts have written into blocks is never reused."""
    stepped = made_engine(fleet, plain, async_scheduling=overlap)
    speculate(stepped.engine, Guesses({"a": plain}, mistakes=0.4))
    assert answer(stepped, "a", prompt(20), params={"max_tokens": 50}) == plain
    hits = stepped.engine.stats().prefix_cache_hits_total
    longer = [*prompt(20), *plain]
    found = answer(stepped, "b", longer, params={"max_tokens": 8})
    assert stepped.engine.stats().prefix_cache_hits_total - hits == 64, "20 + 50 tokens fill four blocks"
    assert found == answer(made_engine(fleet), "a", longer, params={"max_tokens": 8})


@pytest.mark.parametrize("overlap", [False, True])
def test_an_abort_while_drafts_are_in_flight_leaves_nothing_and_changes_no_other_answer(
    fleet, prompt, plain, overlap
) -> None:
    stepped = made_engine(fleet, plain, async_scheduling=overlap)
    for name in ("a", "b", "c"):
        stepped.add(name, prompt(20), params={"max_tokens": 50})
    stepped.until(lambda: len(stepped.tokens.get("a", ())) > 12)
    stepped.engine.abort("b")
    stepped.until(lambda: {"a", "c"} <= stepped.ended.keys())
    assert stepped.tokens["a"] == stepped.tokens["c"] == plain
    assert "b" not in stepped.ended
    stats = stepped.engine.stats()
    assert stats.kv_blocks_free == stats.kv_blocks_total
    assert not stepped.engine.has_work


def test_with_batch_invariance_logprobs_have_the_same_bits_with_drafts_and_without(fleet, prompt) -> None:
    def logprobs(drafter: Any) -> list[float]:
        stepped = made_engine(fleet, batch_invariant=True)
        if drafter is not None:
            speculate(stepped.engine, drafter)
        stepped.add("a", prompt(20), params={"max_tokens": 30, "logprobs": 0, "temperature": 1.0, "seed": 5})
        stepped.until(lambda: "a" in stepped.ended)
        answers["a"] = stepped.tokens["a"]
        return [entry.logprob for entry in stepped.logprobs["a"]]

    answers: dict[str, list[int]] = {}
    expected = logprobs(None)
    assert logprobs(Guesses(answers)) == expected


def test_drafts_take_no_block_that_a_running_sequence_may_need(fleet, prompt, plain) -> None:
    """The cache has room for both answers, and for nothing beside them."""
    stepped = made_engine(fleet, plain, kv_cache_tokens=160, enable_prefix_caching=False)
    for name in ("a", "b"):
        stepped.add(name, prompt(20), params={"max_tokens": 50})
    stepped.until(lambda: {"a", "b"} <= stepped.ended.keys())
    assert stepped.tokens["a"] == stepped.tokens["b"] == plain
    assert stepped.engine.stats().preemptions_total == 0


def test_llm_takes_vllms_dict_and_answers_as_without_it(fleet, prompt) -> None:
    made = fleet("llama3")
    lora = LoRARequest("all", 1, str(made.adapters["all"]))
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logit_bias={9: 100.0, 10: 99.0})
    job = {"prompt_token_ids": prompt(20)}
    answers = []
    for given in (None, {"method": "ngram", "num_speculative_tokens": 3}):
        llm = LLM(str(made.base), enable_lora=True, kv_cache_tokens=1024, speculative_config=given)
        assert (llm._engine.scheduler.speculation is None) == (given is None)
        answers.append([output.outputs[0].token_ids for output in llm.generate([job, job], params, [None, lora])])
        llm.close()
    assert answers[0] == answers[1]
    with pytest.raises(ConfigError, match="method='medusa' is not served"):
        LLM(str(made.base), speculative_config={"method": "medusa"})


def test_a_text_that_repeats_is_drafted_from_itself(fleet, prompt) -> None:
    stepped = made_engine(fleet)
    drafter = NgramDrafter(NGRAM)
    speculation = speculate(stepped.engine, drafter)
    num_steps = 0
    stepped.add("a", prompt(20), params={"max_tokens": 60, "allowed_token_ids": [9]})
    while "a" not in stepped.ended:
        stepped.step()
        num_steps += 1
    assert stepped.tokens["a"] == [9] * 60
    assert num_steps < 30
    assert not speculation._acceptances._by_sequence and not drafter._followed


def test_what_was_wrong_is_drafted_less(fleet, prompt, plain) -> None:
    """The drafts of one request are right and those of the other never; a token costs a fifth of a step."""

    stepped = made_engine(fleet, plain)
    guesses = Guesses({"a": plain, "b": [5] * 50}, mistakes=0.0)
    budget, rows = stepped.engine.scheduler.budget, len(stepped.engine.runner.steps.inputs.sampled_B)
    stepped.engine.scheduler.speculation = Speculation(guesses, budget, 4, rows, DraftsCost(0.2))
    drafted = {"a": 0, "b": 0}
    stepped.add("a", prompt(20), params={"max_tokens": 50})
    stepped.add("b", prompt(20), params={"max_tokens": 50})
    while stepped.engine.has_work:
        for output in stepped.engine.step():
            if output.drafts is not None:
                drafted[output.request_id] += output.drafts.num_tokens
    assert drafted["a"] >= 30
    assert drafted["b"] <= 16


def test_models_that_cannot_go_back_behind_wrong_drafts_are_refused(tmp_path: Path) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    base = make_model(tmp_path / "dynamic", "llama3", rope_parameters=scaling)
    with pytest.raises(ConfigError, match=r"rotates all keys anew .* Leave out speculative_config"):
        SteppedEngine(base, speculative_config=NGRAM)
