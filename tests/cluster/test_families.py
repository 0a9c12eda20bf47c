"""Each family of models served over HTTP: base and adapters in one burst, against transformers + PEFT."""

from __future__ import annotations

import pytest

from tests.cluster.harness import greedy_answers, running_server
from tiny_models import has_experts

KINDS = ("all", "rslora", "regex")
EXPERT_KINDS = ("layered", "router", "down")


# llama3 is test_http.py's, qwen2 test_adapter_kinds.py's. The others differ within the engine alone, where
# test_matches_transformers.py has them all.
@pytest.mark.parametrize("family", ["gemma3", "mixtral"])
async def test_a_burst_equals_transformers_and_peft(fleet, prompt, tmp_path, family):
    made = fleet(family)
    kinds = EXPERT_KINDS if has_experts(family) else KINDS
    arguments = ["--model", str(made.base), "--lora-modules", *(f"{kind}={made.adapters[kind]}" for kind in kinds)]
    arguments += ["--max-loras", "2", "--kv-cache-tokens", "4096", "--max-num-batched-tokens", "32"]
    arguments += ["--max-num-seqs", "8", "--device", "cpu"]
    jobs = [(prompt(n), kind) for n in (5, 40) for kind in (None, *kinds)]
    with running_server(arguments, tmp_path / "serve.log") as url:
        # Without --served-model-name the folder is the name.
        answers = await greedy_answers(url, jobs, base=str(made.base))
    for (ids, kind), answer in zip(jobs, answers, strict=True):
        expected = made.reference.greedy(ids, 10, made.adapters.get(kind))
        assert answer.choices[0].model_extra["token_ids"] == expected.tokens, kind
        assert answer.choices[0].logprobs.token_logprobs == pytest.approx(expected.logprobs, abs=1e-3)
