"""Activated LoRA in the engine, against PEFT's own generate(): it works from the prompt's last invocation on, and
shares the keys and values before it with the base."""

from __future__ import annotations

import random

import pytest

from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from tiny_models import make_adapter

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
INVOCATION = [17, 23, 5]
OTHER = [40, 41]


@pytest.fixture
def activated(fleet, tmp_path):
    """Two activated adapters and a plain one over one base."""
    made = fleet("llama3")
    options = {"task_type": "CAUSAL_LM"}
    adapters = {
        "one": make_adapter(tmp_path / "one", made.base, alora_invocation_tokens=INVOCATION, **options),
        "other": make_adapter(tmp_path / "other", made.base, seed=2, alora_invocation_tokens=OTHER, **options),
        "plain": made.adapters["all"],
    }
    return made, adapters


def prompts(prompt) -> list[list[int]]:
    """With the invocation nowhere, first, last, in the middle, twice; prefilled in one chunk and in several."""
    before, after = prompt(40), prompt(21)
    return [
        before,
        INVOCATION + after,
        before + INVOCATION,
        before + INVOCATION + after,
        INVOCATION + before + INVOCATION + OTHER + after,
        before + OTHER + after,
        INVOCATION,
    ]


def assert_same(output, expected) -> None:
    [completion] = output.outputs
    assert completion.token_ids == expected.tokens
    assert [p.logprob for p in completion.logprobs] == pytest.approx(expected.logprobs, abs=1e-3)


@pytest.mark.parametrize("max_num_batched_tokens", [16, 256])
def test_activated_adapters_answer_as_peft_does_beside_plain_ones_and_the_base(
    activated, prompt, max_num_batched_tokens
):
    made, adapters = activated
    llm = LLM(
        str(made.base),
        enable_lora=True,
        max_loras=3,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=8,
        kv_cache_tokens=4096,
    )
    jobs = [(p, name) for p in prompts(prompt) for name in (None, *adapters)]
    random.Random(0).shuffle(jobs)
    requests = {name: LoRARequest(name, i + 1, str(path)) for i, (name, path) in enumerate(adapters.items())}
    outputs = llm.generate(
        [{"prompt_token_ids": p} for p, _ in jobs],
        GREEDY,
        lora_request=[None if name is None else requests[name] for _, name in jobs],
    )
    for (p, name), output in zip(jobs, outputs, strict=True):
        assert_same(output, made.reference.greedy(p, 8, adapters.get(name), likely=output.outputs[0].token_ids))


def test_what_comes_before_the_invocation_is_found_in_the_base_s_cache_and_the_other_way_round(activated, prompt):
    made, adapters = activated
    llm = LLM(str(made.base), enable_lora=True, kv_cache_tokens=4096, block_size=16)
    one = LoRARequest("one", 1, str(adapters["one"]))
    plain = LoRARequest("plain", 2, str(adapters["plain"]))
    shared = prompt(40)

    def cached(tokens: list[int], lora: LoRARequest | None) -> int:
        [output] = llm.generate({"prompt_token_ids": tokens}, GREEDY, lora)
        assert_same(output, made.reference.greedy(tokens, 8, adapters[lora.lora_name] if lora else None))
        return output.num_cached_tokens

    assert cached(shared, None) == 0
    invoked = [*shared, *INVOCATION, *prompt(30)]
    assert cached(invoked, one) == 32
    assert cached(invoked, one) == 64
    assert cached(invoked, plain) == 0
    assert cached(invoked, None) == 32
