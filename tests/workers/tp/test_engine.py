"""A whole engine over several ranks, processes of their own, against the same engine on one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lorafleet.workers.llm import LLM, SamplingParams


@pytest.fixture(scope="module", params=[2])
def pair(request, fleet) -> Iterator[tuple[LLM, LLM]]:
    models = [
        LLM(
            str(fleet("llama3").base),
            device="cpu",
            dtype="float32",
            kv_cache_tokens=2048,
            tensor_parallel_size=size,
            enable_lora=False,
            cpu_threads=1,
        )
        for size in (1, request.param)
    ]
    yield models[0], models[1]
    for model in models:
        model.close()


def test_greedy(pair, prompt):
    prompts = [{"prompt_token_ids": prompt(n)} for n in (5, 40, 17)]
    alone, shared = (llm.generate(prompts, SamplingParams(max_tokens=12, logprobs=3)) for llm in pair)
    assert [o.outputs[0].token_ids for o in alone] == [o.outputs[0].token_ids for o in shared]
