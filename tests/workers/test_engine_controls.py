"""Pauses, aborts and switches of adapters in an engine that is stepped by hand."""

from __future__ import annotations

import pytest

from classifiers import make_classifier
from lorafleet.protocol.adapter_mix import mixed
from lorafleet.protocol.engine_control import (
    AbortRequests,
    FlushPrefixes,
    PauseEngine,
    ResumeEngine,
    SupersedeAdapter,
)
from lorafleet.protocol.errors import AdapterChanged
from lorafleet.protocol.lora_request import LoRARequest
from stepped_engine import NUM_TOKENS, SteppedEngine


@pytest.fixture(params=[False, True], ids=["one-step", "overlapping"])
def stepped(request, fleet):
    made = SteppedEngine(fleet("llama3").base, async_scheduling=request.param)
    yield made
    made.engine.close()


def test_a_switched_answer_goes_on_as_the_new_version_would(stepped, fleet, prompt):
    made, ids = fleet("llama3"), prompt(9)
    old = stepped.load("policy", made.adapters["all"], 1)
    new = stepped.load("policy", made.adapters["qv"], 2)
    alias = LoRARequest("stable", 1, old.lora_path, old.digest, version=1)
    for name, lora, demand in (
        ("a", old, "any"),
        ("exact", old, "exact"),
        ("alias", alias, "any"),
        ("base", None, "any"),
    ):
        stepped.add(name, ids, lora, version_demand=demand)
    stepped.until(lambda: all(len(stepped.tokens.get(name, ())) >= 4 for name in ("a", "exact", "alias", "base")))
    stepped.add("late", ids, old)  # It is still waiting.
    stepped.order(SupersedeAdapter(new, aborts=False))
    stepped.until(lambda: len(stepped.ended) == 5)
    [switch] = stepped.switches["a"]
    assert switch.start >= 4 and switch.lora == new
    before = stepped.tokens["a"][: switch.start]
    assert before == made.reference.greedy(ids, switch.start, made.adapters["all"]).tokens
    rest = made.reference.greedy(ids + before, NUM_TOKENS - switch.start, made.adapters["qv"]).tokens
    assert stepped.tokens["a"] == before + rest
    assert [switch.start for switch in stepped.switches["late"]] == [0]
    assert stepped.tokens["late"] == made.reference.greedy(ids, NUM_TOKENS, made.adapters["qv"]).tokens
    for name, adapter in (("exact", "all"), ("alias", "all"), ("base", None)):
        assert not stepped.switches[name]
        assert stepped.tokens[name] == made.reference.greedy(ids, NUM_TOKENS, made.adapters.get(adapter)).tokens
    assert stepped.engine.stats().kv_blocks_free == stepped.engine.stats().kv_blocks_total


@pytest.mark.parametrize("aborts", [False, True], ids=["switch", "abort"])
@pytest.mark.parametrize("is_later", [True, False], ids=["later", "earlier"])
def test_a_push_spares_the_answers_that_may_finish(stepped, fleet, prompt, aborts, is_later):
    made = fleet("llama3")
    old = stepped.load("policy", made.adapters["all"], 5)
    new = stepped.load("policy", made.adapters["qv"], 6 if is_later else 4)
    alias = LoRARequest("stable", 1, old.lora_path, old.digest, version=5)
    mix = mixed([old, new], [0.5, 0.5])
    cases = [("own", old), ("alias", alias), ("mix", mix), ("base", None)]
    names = []
    for model, lora in cases:
        for demand in ("any",) if model in ("mix", "base") else ("any", "least", "exact"):
            names.append(f"{model} {demand}")
            stepped.add(names[-1], prompt(9), lora, version_demand=demand)
    stepped.until(lambda: all(stepped.tokens.get(name) for name in names))
    late = [f"late {demand}" for demand in ("any", "exact")]  # These are still waiting.
    for name in late:
        stepped.add(name, prompt(9), old, version_demand=name.removeprefix("late "))
    stepped.order(SupersedeAdapter(new, aborts))
    stepped.until(lambda: len(stepped.ended) == len(names + late))
    concerned = {"own any", "late any"} | ({"own least"} if is_later else set())
    for name in names + late:
        assert stepped.ended[name] == ("abort" if aborts and name in concerned else "length"), name
        assert bool(stepped.switches[name]) == (not aborts and name in concerned), name


def test_no_answer_goes_on_with_a_version_that_classifies(stepped, fleet, prompt, tmp_path):
    made = fleet("llama3")
    old = stepped.load("policy", made.adapters["all"], 1)
    new = stepped.load("policy", make_classifier(tmp_path, made.base, "SEQ_CLS", 2, seed=0), 2)
    stepped.add("a", prompt(9), old)
    stepped.until(lambda: "a" in stepped.tokens)
    with pytest.raises(AdapterChanged, match="classification head"):
        stepped.order(SupersedeAdapter(new, aborts=False))


def test_keep_freezes_an_answer_and_resume_goes_on(stepped, fleet, prompt):
    ids = prompt(9)
    stepped.add("a", ids)
    stepped.until(lambda: len(stepped.tokens.get("a", ())) >= 3)
    stepped.order(PauseEngine("keep"))
    assert stepped.engine.stats().paused == "keep" and not stepped.engine.has_work
    frozen = len(stepped.tokens["a"])
    stepped.add("b", ids)
    for _ in range(5):
        stepped.step()
    assert len(stepped.tokens["a"]) == frozen and "b" not in stepped.tokens
    stepped.order(ResumeEngine())
    stepped.until(lambda: len(stepped.ended) == 2)
    assert stepped.tokens["a"] == stepped.tokens["b"] == fleet("llama3").reference.greedy(ids, NUM_TOKENS).tokens


def test_wait_ends_what_has_started_and_starts_nothing(stepped, prompt):
    stepped.add("a", prompt(9))
    stepped.until(lambda: "a" in stepped.tokens)
    done = stepped.engine.control(PauseEngine("wait"))
    stepped.add("b", prompt(9))
    stepped.until(done.done)
    assert stepped.ended == {"a": "length"}
    for _ in range(5):
        stepped.step()
    assert "b" not in stepped.tokens
    stepped.order(ResumeEngine())
    stepped.until(lambda: "b" in stepped.ended)


def test_a_pause_that_never_comes_about_is_answered_at_the_resume(stepped, prompt):
    stepped.add("a", prompt(9))
    stepped.until(lambda: "a" in stepped.tokens)
    waiting = stepped.engine.control(PauseEngine("wait"))
    stepped.order(PauseEngine("keep"))
    stepped.until(waiting.done)
    assert not stepped.ended


def test_aborts_end_the_requests_that_they_name(stepped, fleet, prompt):
    old = stepped.load("policy", fleet("llama3").adapters["all"], 1)
    new = stepped.load("policy", fleet("llama3").adapters["qv"], 2)
    for name, lora, tenant in (("r-1", None, "x"), ("r-2", None, "y"), ("s-1", None, "x"), ("p-1", old, "")):
        stepped.add(name, prompt(9), lora, tenant=tenant)
    stepped.until(lambda: len(stepped.tokens) == 4)
    stepped.order(AbortRequests("r-", "x"))
    stepped.order(SupersedeAdapter(new, aborts=True))
    stepped.until(lambda: len(stepped.ended) == 4)
    assert stepped.ended == {"r-1": "abort", "r-2": "length", "s-1": "length", "p-1": "abort"}
    stepped.add("t-1", prompt(9))
    stepped.order(PauseEngine("abort"))
    assert stepped.ended["t-1"] == "abort"


def test_a_flush_forgets_the_prefixes(stepped, prompt):
    ids = prompt(40)
    for name in ("one", "again"):
        stepped.add(name, ids)
        stepped.until(lambda name=name: name in stepped.ended)
    hits = stepped.engine.stats().prefix_cache_hits_total
    assert hits > 0
    stepped.order(FlushPrefixes())
    stepped.add("last", ids)
    stepped.until(lambda: "last" in stepped.ended)
    assert stepped.engine.stats().prefix_cache_hits_total == hits
