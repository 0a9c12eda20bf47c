"""Steps that overlap: launched before the last one's tokens are known. The answers are those of steps that do not."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.messages import EngineRequest
from lorafleet.protocol.step_metrics import StepShape
from lorafleet.workers.schedule.sequence import Sequence
from lorafleet.workers.schedule.step_budget import StepBudget, StepLimits
from lorafleet.workers.startup import build_engine

BANNED = [[12], [9, 10], [10, 11, 11], [11, 9, 11, 9]]


@pytest.mark.parametrize("overlap", [False, True])
def test_no_banned_sequence_is_completed_and_only_allowed_tokens_come(fleet, prompt, overlap):
    """The last token before is still on the device when an overlapping step is launched."""
    llm = LLM(str(fleet("llama3").base), kv_cache_tokens=1024, async_scheduling=overlap)
    params = {"temperature": 50.0, "max_tokens": 60, "ignore_eos": True, "allowed_token_ids": [9, 10, 11, 12, 13]}
    job = {"prompt_token_ids": [*prompt(4), 9]}
    free = llm.generate([job] * 6, [SamplingParams(**params, seed=seed) for seed in range(6)])
    kept = llm.generate(
        [job] * 6, [SamplingParams(**params, seed=seed, bad_words_token_ids=BANNED) for seed in range(6)]
    )
    likely = SamplingParams(
        max_tokens=2, ignore_eos=True, logit_bias={10: 100.0}, bad_words_token_ids=[[9, 10], [10, 10]]
    )
    [begun] = llm.generate(job, likely)
    llm.close()

    def banned(tokens: list[int]) -> bool:
        return any(tokens[i : i + len(ban)] == ban for ban in BANNED for i in range(len(tokens)))

    assert all(banned(output.outputs[0].token_ids) for output in free)
    assert not any(banned(output.outputs[0].token_ids) for output in kept)
    assert {token for output in kept for token in output.outputs[0].token_ids} == {9, 10, 11, 13}
    first, second = begun.outputs[0].token_ids
    assert first == 10  # the prompt's 9 does not begin a banned sequence
    assert second != 10


def test_answers_are_those_of_steps_one_by_one(fleet, prompt):
    made = fleet("llama3")
    rng = random.Random(5)
    kinds = [
        {"temperature": 0},
        {"temperature": 0, "stop_token_ids": list(range(100, 140))},
        {"temperature": 1.0, "seed": 3, "top_p": 0.9},
        {"temperature": 1.2, "seed": 4, "top_k": 20, "stop_token_ids": list(range(60, 90))},
        {"temperature": 0, "frequency_penalty": 1.0, "min_tokens": 4, "stop_token_ids": list(range(5, 300))},
        {"temperature": 0.8, "seed": 5, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 1.0, "seed": 6, "repetition_penalty": 1.3, "presence_penalty": 0.4, "logit_bias": {7: 3.0}},
        {"temperature": 1.5, "seed": 7, "allowed_token_ids": [9, 10, 11, 12, 13], "bad_words_token_ids": BANNED},
        {"temperature": 0, "n": 2, "max_tokens": 1},
    ]
    names = [None, "all", "qv", "regex"]
    requests = {n: LoRARequest(n, i, str(made.adapters[n])) for i, n in enumerate(names) if n}
    jobs = [(prompt(rng.randrange(1, 60)), rng.choice(kinds), rng.choice(names)) for _ in range(60)]

    def answers(overlap: bool) -> tuple[list[object], list[list[float]]]:
        llm = LLM(
            str(made.base),
            enable_lora=True,
            max_loras=2,
            kv_cache_tokens=640,  # so few that sequences are preempted
            max_model_len=128,
            max_num_batched_tokens=64,
            max_num_seqs=12,
            async_scheduling=overlap,
        )
        params = [SamplingParams(**({"max_tokens": 30, "ignore_eos": True} | options)) for _, options, _ in jobs]
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids, _, _ in jobs], params, [requests.get(name) for _, _, name in jobs]
        )
        stats = llm._engine.stats()
        assert stats.preemptions_total > 0
        assert stats.kv_blocks_free == stats.kv_blocks_total
        assert all(slot.holders == 0 for slot in llm._engine.loras.slots.slots)
        chosen = [[(c.token_ids, c.finish_reason, c.stop_reason) for c in o.outputs] for o in outputs]
        found = [entry for o in outputs for c in o.outputs for entry in (c.logprobs or []) + (o.prompt_logprobs or [])]
        return chosen, [[e.logprob, *e.top_logprobs] for e in found if e is not None]

    tokens, logprobs = answers(True)
    expected_tokens, expected_logprobs = answers(False)
    assert tokens == expected_tokens
    assert len(logprobs) > 100
    for ours, expected in zip(logprobs, expected_logprobs, strict=True):
        assert ours == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 2, "prompt_logprobs": 1},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"logit_bias": {5: 1.0}, "min_tokens": 3, "stop_token_ids": [1]},
        {"allowed_token_ids": [5, 6, 7, 8], "bad_words_token_ids": [[5], [6, 6], [7, 6, 7]]},
    ],
    ids=str,
)
def test_no_sampling_field_keeps_a_step_from_running_ahead(fleet, prompt, fields):
    engine = build_engine(EngineConfig(str(fleet("llama3").base), kv_cache_tokens=1024, async_scheduling=True))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, **fields)
    engine.add(EngineRequest(request_id="only", prompt_token_ids=prompt(9), params=params))
    # each is launched before the tokens of the last are known
    assert [len(engine.step()) for _ in range(3)] == [0, 1, 1]
    assert engine.pipeline.has_step


def test_a_sequence_whose_edits_fail_ends_alone_and_what_it_shares_of_its_prompt_is_right(fleet, prompt, monkeypatch):
    """The others take the blocks of the prompt that the failing one computes in the same step."""
    made = fleet("llama3")
    for overlap in (False, True):
        engine = build_engine(EngineConfig(str(made.base), kv_cache_tokens=1024, async_scheduling=overlap))
        upload = engine.runner._editor._upload

        def trip(sequence: Sequence, upload: Callable[[Sequence], object] = upload) -> object:
            if sequence.request_id == "trips":
                raise IndexError("an index out of range")
            return upload(sequence)

        monkeypatch.setattr(engine.runner._editor, "_upload", trip)
        for name, penalty in (("trips", 1.1), ("one", 1.0), ("two", 1.0)):
            params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, repetition_penalty=penalty)
            engine.add(EngineRequest(request_id=name, prompt_token_ids=prompt(60), params=params))
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        refused = [one for one in outputs if one.error is not None]
        assert [one.request_id for one in refused] == ["trips"]
        assert "IndexError" in refused[0].error.message
        expected = made.reference.greedy(prompt(60), 5).tokens
        for name in ("one", "two"):
            assert [t for one in outputs if one.request_id == name for t in one.token_ids] == expected
        stats = engine.stats()
        assert stats.prefix_cache_hits_total > 0
        assert stats.kv_blocks_free == stats.kv_blocks_total


def test_tokens_come_one_step_late_and_none_is_lost_by_an_abort(fleet, prompt):
    engine = build_engine(EngineConfig(str(fleet("llama3").base), kv_cache_tokens=1024, async_scheduling=True))
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    for name in ("kept", "left"):
        engine.add(EngineRequest(request_id=name, prompt_token_ids=prompt(9), params=params))
    assert [*engine.step()] == []
    assert not engine.stalled
    assert {o.request_id for o in engine.step()} == {"kept", "left"}
    engine.abort("left")
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert {o.request_id for o in outputs} == {"kept"}
    assert sum(len(o.token_ids) for o in outputs) == 4
    assert engine.stats().kv_blocks_free == engine.stats().kv_blocks_total


@pytest.mark.parametrize("overlap", [True, False])
def test_a_long_prompt_that_is_preempted_for_another_tenant_is_answered_all_the_same(fleet, prompt, overlap):
    config = EngineConfig(
        str(fleet("llama3").base),
        kv_cache_tokens=1024,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        async_scheduling=overlap,
    )
    engine = build_engine(config)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

    def add(name: str, tenant: str, num_prompt: int) -> None:
        ids = prompt(num_prompt)
        engine.add(EngineRequest(request_id=name, prompt_token_ids=ids, params=params, tenant=tenant))

    add("short", "noisy", 9)
    add("long", "noisy", 100)
    outputs = [*engine.step(), *engine.step()]  # a part of the long prompt is in flight
    add("quiet", "quiet", 5)
    while engine.has_work:
        outputs += engine.step()
    assert engine.stats().preemptions_total == 1
    assert [o.error for o in outputs if o.error is not None] == []
    assert {o.request_id: o.finish_reason for o in outputs} == dict.fromkeys(("short", "long", "quiet"), "length")


@pytest.mark.parametrize("overlap", [True, False])
def test_the_budget_of_steps_learns_how_long_each_step_took(fleet, prompt, overlap):
    class RecordingBudget(StepBudget):
        def __init__(self, limits: StepLimits) -> None:
            super().__init__(limits)
            self.observed: list[tuple[StepShape, float]] = []

        def observe(self, shape: StepShape, seconds: float) -> None:
            self.observed.append((shape, seconds))
            super().observe(shape, seconds)

    config = EngineConfig(
        str(fleet("llama3").base),
        kv_cache_tokens=1024,
        max_num_batched_tokens=16,
        max_num_seqs=4,
        async_scheduling=overlap,
    )
    engine = build_engine(config)
    assert (engine.scheduler.budget.limits.max_gap_s, engine.scheduler.budget.limits.ttft_target_s) == (0.05, 0.5)
    engine.scheduler.budget = budget = RecordingBudget(engine.scheduler.budget.limits)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    engine.add(EngineRequest(request_id="only", prompt_token_ids=prompt(20), params=params))
    while engine.has_work:
        engine.step()
    shapes, seconds = zip(*budget.observed, strict=True)
    assert [(shape.kind, shape.num_tokens) for shape in shapes] == [
        ("prefill", 16),
        ("prefill", 4),
        ("decode", 1),
        ("decode", 1),
    ]
    assert [shape.prompts for shape in shapes] == [((16, 16),), ((4, 20),), (), ()]
    assert all(0 < one < 60 for one in seconds)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_token_of_a_sequence_with_nothing_else_to_tell_makes_no_object(fleet, prompt, overlap):
    engine = build_engine(EngineConfig(str(fleet("llama3").base), kv_cache_tokens=1024, async_scheduling=overlap))
    for name, logprobs in (("quiet", None), ("shown", 1)):
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=logprobs)
        engine.add(EngineRequest(request_id=name, prompt_token_ids=prompt(9), params=params))
    steps = []
    while engine.has_work:
        steps.append(engine.step())
    assert [name for step in steps for name in step.plain.request_ids] == ["quiet"] * 3  # not the first and the last
    objects = [output for step in steps for output in step.others]
    assert [output.request_id for output in objects].count("quiet") == 2
    found = {name: [] for name in ("quiet", "shown")}
    for output in (output for step in steps for output in step):
        found[output.request_id] += output.token_ids
    assert len(found["quiet"]) == 5 and found["quiet"] == found["shown"]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_full_block_of_an_answer_makes_no_object_and_is_shared_while_the_answer_goes_on(fleet, prompt, overlap):
    engine = build_engine(EngineConfig(str(fleet("llama3").base), kv_cache_tokens=1024, async_scheduling=overlap))
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    engine.add(EngineRequest(request_id="first", prompt_token_ids=prompt(9), params=params))
    outputs, answer = [], []
    while len(answer) < 40:
        outputs += engine.step()
        answer = [token for output in outputs for token in output.token_ids]
    engine.add(EngineRequest(request_id="second", prompt_token_ids=[*prompt(9), *answer[:30]], params=params))
    others = []
    while engine.has_work:
        others += engine.step().others
    assert next(output.num_cached_tokens for output in others if output.request_id == "second") == 32
    assert [output.request_id for output in others].count("first") == 1, "the last token alone has something to tell"
