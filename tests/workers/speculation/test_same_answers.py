"""Answers with drafts are those without, token by token and logprob by logprob, whatever the requests ask for."""

from __future__ import annotations

import random
from typing import Any

import pytest

from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from lorafleet.protocol import structured_spec
from lorafleet.protocol.engine_config import SpeculativeConfig
from lorafleet.workers.speculation.ngram_drafter import NgramDrafter
from ranks import start_llm
from tests.workers.speculation.drafting import Guesses, speculate

BANNED = [[12], [9, 10], [10, 11, 11], [11, 9, 11, 9]]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "stop_token_ids": list(range(100, 140))},
    {"temperature": 1.0, "seed": 3, "top_p": 0.9},
    {"temperature": 1.2, "seed": 4, "top_k": 20, "stop_token_ids": list(range(60, 90))},
    {"temperature": 0, "frequency_penalty": 1.0, "min_tokens": 4, "stop_token_ids": list(range(5, 300))},
    {"temperature": 0.8, "seed": 15, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 1.0, "seed": 6, "repetition_penalty": 1.3, "presence_penalty": 0.4, "logit_bias": {7: 3.0}},
    {"temperature": 1.5, "seed": 7, "allowed_token_ids": [9, 10, 11, 12, 13], "bad_words_token_ids": BANNED},
    {"temperature": 0.9, "seed": 8, "logprobs": 3, "logprobs_mode": "processed_logprobs", "frequency_penalty": 0.5},
    {"temperature": 0, "stop": ["e", "the"], "max_tokens": 20},
    {"temperature": 1.0, "seed": 9, "n": 3, "max_tokens": 9},
    {"temperature": 0, "n": 2, "max_tokens": 1},
    {
        "temperature": 1.0,
        "seed": 10,
        "ignore_eos": False,
        "structured_outputs": structured_spec.regex("(the |of ){9}", "x"),
    },
]


class Answers:
    """The answers of one engine to the jobs, and what it drafted."""

    def __init__(self, fleet: Any, jobs: list[Any], *, drafter: Any = None, **options: Any) -> None:
        names = [None, "all", "qv", "regex"]
        requests = {n: LoRARequest(n, i, str(fleet.adapters[n])) for i, n in enumerate(names) if n}
        room = {"kv_cache_tokens": 400, "max_model_len": 128, "max_num_batched_tokens": 64, "max_num_seqs": 12}
        llm = LLM(str(fleet.base), enable_lora=True, max_loras=2, **(room | options))
        engine = llm._engine
        if drafter is not None:
            speculate(engine, drafter)
        self.by_request: dict[str, list[int]] = {}
        self.drafted = self.accepted = 0
        self._count(llm)
        params = [SamplingParams(**({"max_tokens": 30, "ignore_eos": True} | fields)) for _, fields, _ in jobs]
        prompts = [{"prompt_token_ids": ids} for ids, _, _ in jobs]
        outputs = llm.generate(prompts, params, [requests.get(name) for _, _, name in jobs])
        self.stats = engine.stats()
        assert self.stats.kv_blocks_free == self.stats.kv_blocks_total
        assert all(slot.holders == 0 for slot in engine.loras.slots.slots)
        self.chosen = [[(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in o.outputs] for o in outputs]
        found = [entry for o in outputs for c in o.outputs for entry in (c.logprobs or []) + (o.prompt_logprobs or [])]
        self.logprobs = [[e.logprob, *e.top_logprobs] for e in found if e is not None]
        self.logprob_tokens = [(e.token_id, e.top_ids) for e in found if e is not None]
        llm.close()

    def _count(self, llm: LLM) -> None:
        """Records the engine's outputs while they pass."""
        step = llm._engine.step

        def recorded() -> Any:
            outputs = step()
            for output in outputs:
                self.by_request.setdefault(output.request_id, []).extend(output.token_ids)
                if output.drafts is not None:
                    self.drafted += output.drafts.num_tokens
                    self.accepted += output.drafts.num_accepted
            return outputs

        llm._engine.step = recorded  # type: ignore[method-assign]


def jobs_of(prompt: Any, count: int) -> list[Any]:
    rng = random.Random(5)
    names = [None, "all", "qv", "regex"]
    return [(prompt(rng.randrange(1, 60)), rng.choice(KINDS), rng.choice(names)) for _ in range(count)]


@pytest.mark.parametrize("overlap", [False, True])
def test_answers_are_those_without_drafts_whatever_is_drafted(fleet, prompt, overlap):
    """All kinds of requests and several adapters share the steps, and sequences are preempted."""
    made, jobs = fleet("llama3"), jobs_of(prompt, 60)
    expected = Answers(made, jobs, async_scheduling=overlap)
    assert expected.stats.preemptions_total > 0
    assert len(expected.logprobs) > 100
    drafters = [Guesses(expected.by_request), NgramDrafter(SpeculativeConfig("ngram", prompt_lookup_min=1))]
    for drafter in drafters:
        drafted = Answers(made, jobs, drafter=drafter, async_scheduling=overlap)
        assert drafted.chosen == expected.chosen
        assert drafted.logprob_tokens == expected.logprob_tokens
        for ours, plain in zip(drafted.logprobs, expected.logprobs, strict=True):
            assert ours == pytest.approx(plain, abs=1e-4)
        assert drafted.stats.preemptions_total > 0
        assert 0 < drafted.accepted < drafted.drafted
    assert drafted.drafted > 20


def test_two_ranks_answer_with_drafts_as_without(fleet, prompt):
    """They share adapters of several kinds, sampled tokens, penalties and logprobs."""
    made = fleet("llama3")
    names = [None, "all", "qv", "regex"]
    loras = [None if name is None else LoRARequest(name, i, str(made.adapters[name])) for i, name in enumerate(names)]
    kinds = [kind for kind in KINDS if "n" not in kind and "structured_outputs" not in kind]
    params = [SamplingParams(**({"max_tokens": 16, "ignore_eos": True} | kind)) for kind in kinds]
    jobs = [{"prompt_token_ids": prompt(7 + 3 * i)} for i in range(len(kinds))]
    llm = start_llm(str(made.base), 2, enable_lora=True, max_loras=3, speculative_config={"method": "ngram"})

    def answers() -> list[Any]:
        outputs = llm.generate(jobs, params, [loras[i % 4] for i in range(len(jobs))])
        return [(o.outputs[0].token_ids, o.outputs[0].text, o.outputs[0].finish_reason) for o in outputs]

    try:
        llm._engine.scheduler.speculation = None
        expected, num_steps = answers(), llm._engine.stats().steps_total
        guesses = {f"{len(jobs) + i}-0": tokens for i, (tokens, *_) in enumerate(expected)}
        speculate(llm._engine, Guesses(guesses))
        assert answers() == expected
        assert llm._engine.stats().steps_total - num_steps < 0.8 * num_steps
    finally:
        llm.close()
