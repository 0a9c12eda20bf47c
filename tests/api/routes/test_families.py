"""Each family of models served over HTTP: base and adapters in one burst, against transformers + PEFT."""

from __future__ import annotations

from typing import Any

import pytest

import real_server
from real_server import BASE
from tests.cluster.harness import greedy_answers
from tiny_models import has_experts

KINDS = ("all", "rslora", "regex")
EXPERT_KINDS = ("layered", "router", "down")


# tests/api/answer/test_whole_api.py has llama3, and test_adapter_kinds.py has qwen2. The others differ within the
# engine alone, where test_matches_transformers.py has them all.
@pytest.mark.parametrize("family", ["gemma3", "mixtral"])
async def test_a_burst_equals_transformers_and_peft(fleet, prompt, tmp_path, family):
    made = fleet(family)
    adapters = {kind: made.adapters[kind] for kind in (EXPERT_KINDS if has_experts(family) else KINDS)}
    jobs = [(prompt(n), kind) for n in (5, 40) for kind in (None, *adapters)]
    engine: dict[str, Any] = {"kv_cache_tokens": 4096, "max_num_batched_tokens": 32, "max_num_seqs": 8, "device": "cpu"}
    with real_server.running(tmp_path, made.base, adapters, {}, **engine) as server:
        answers = await greedy_answers(server.url, jobs, base=BASE)
    for (ids, kind), answer in zip(jobs, answers, strict=True):
        tokens = answer.choices[0].model_extra["token_ids"]
        expected = made.reference.greedy_along(ids, tokens, made.adapters.get(kind))
        assert len(tokens) == 10 and tokens == expected.tokens, kind
        assert answer.choices[0].logprobs.token_logprobs == pytest.approx(expected.logprobs, abs=1e-3)
