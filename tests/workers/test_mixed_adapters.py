"""Mixes of adapters in the engine against PEFT's add_weighted_adapter(combination_type="cat"), beside their parts."""

from __future__ import annotations

import pytest

from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from lorafleet.protocol.errors import RankTooLarge
from tiny_models import make_adapter

PARAMS = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
MIXES = [(("one", "two"), (0.7, 0.3)), (("two", "one", "three"), (-1.0, 1.5, 0.25)), (("one", "three"), (1.0, 1.0))]


@pytest.fixture(scope="module")
def adapters(fleet, tmp_path_factory):
    """Of different ranks, scalings and targets."""
    base, root = fleet("llama3").base, tmp_path_factory.mktemp("parts")
    return {
        "one": make_adapter(root / "one", base, seed=1, r=4),
        "two": make_adapter(root / "two", base, seed=2, r=8, lora_alpha=4, target_modules=["q_proj", "down_proj"]),
        "three": make_adapter(root / "three", base, seed=3, r=3, use_rslora=True, target_modules=["q_proj", "up_proj"]),
    }


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_mixes_answer_as_peft_does_beside_their_parts(fleet, prompt, adapters, tensor_parallel_size):
    made = fleet("llama3")
    llm = LLM(
        str(made.base),
        enable_lora=True,
        max_loras=4,
        kv_cache_tokens=4096,
        tensor_parallel_size=tensor_parallel_size,
    )
    requests = {name: LoRARequest(name, i + 1, str(path)) for i, (name, path) in enumerate(adapters.items())}
    parts = {}
    for i, (names, weights) in enumerate(MIXES):
        requests[f"mix {i}"] = llm.mix_loras([requests[name] for name in names], weights)
        parts[f"mix {i}"] = {adapters[name]: weight for name, weight in zip(names, weights, strict=True)}
    jobs = [(prompt(n), name) for n in (5, 30) for name in requests]
    outputs = llm.generate(
        [{"prompt_token_ids": p} for p, _ in jobs], PARAMS, lora_request=[requests[name] for _, name in jobs]
    )
    for (p, name), output in zip(jobs, outputs, strict=True):
        found = [entry.logprob for entry in output.prompt_logprobs[1:]]
        if name in parts:
            expected = made.reference.mixed_logprobs(p, parts[name])
        else:
            expected = made.reference.logprobs(p, adapters[name])
        assert found == pytest.approx(expected, abs=1e-3)
    llm.close()


def test_a_mix_of_too_high_a_rank_is_refused_and_its_parts_are_served_on(fleet, prompt, adapters):
    llm = LLM(str(fleet("llama3").base), enable_lora=True, max_lora_rank=8, kv_cache_tokens=1024)
    one, two = (LoRARequest(name, i + 1, str(adapters[name])) for i, name in enumerate(("one", "two")))
    with pytest.raises(RankTooLarge, match=r"= 12 on"):
        llm.generate({"prompt_token_ids": prompt(5)}, PARAMS, llm.mix_loras([one, two]))
    [output] = llm.generate({"prompt_token_ids": prompt(5)}, PARAMS, one)
    assert output.outputs[0].token_ids
