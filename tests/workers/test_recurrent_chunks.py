"""Prompts of recurrent models from 1 to 3,000 tokens, cut into chunks of many sizes, with and without prefix hits.

One forward pass of transformers over the longest prompt has the expected answers of all, since the others are its
beginnings.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from family_cases import CASES, FamilyCase, make_case
from lorafleet.offline.llm import LLM, RequestOutput, SamplingParams
from tiny_models import Reference

LONGEST = 3000
# Around multiples of a KV block, of a chunk and of the interval of snapshots. The longest comes before its beginnings.
LENGTHS = (1, 2, 3, 15, 17, 63, 64, 65, 66, 127, 129, 200, 311, 1023, LONGEST, 1500, 2049, 2999)
ONE = SamplingParams(temperature=0, max_tokens=1, logprobs=0)
FAMILIES = ["qwen3_5", "qwen3_next", "nemotron_h", "granite4_hybrid", "bamba", "falcon_h1", "lfm2", "olmo_hybrid"]


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_of_any_length_are_computed_in_chunks_of_any_size(tmp_path: Path, prompt, name: str) -> None:
    case = CASES[name]
    base = make_case(tmp_path, FamilyCase(case.name, case.options | {"max_position_embeddings": 4096}))
    tokens = prompt(LONGEST)
    expected_TV = Reference(base).next_logprobs(tokens)
    prompts = [{"prompt_token_ids": tokens[:length]} for length in LENGTHS]

    # Sequences share a step's tokens, so that chunks of the long ones have many sizes.
    for most_tokens, max_num_seqs, has_cache in ((57, 3, True), (211, 5, False), (1013, 4, True)):
        sizes = {"max_num_batched_tokens": most_tokens, "max_num_seqs": max_num_seqs, "kv_cache_tokens": 8192}
        llm = LLM(str(base), device="cpu", enable_lora=False, enable_prefix_caching=has_cache, **sizes)
        for _ in range(2 if has_cache else 1):
            outputs = llm.generate(prompts, ONE)
            for length, output in zip(LENGTHS, outputs, strict=True):
                check(output, expected_TV[length - 1])
        num_cached = sum(output.num_cached_tokens for output in outputs)
        assert num_cached > sum(LENGTHS) // 2 if has_cache else num_cached == 0


def check(output: RequestOutput, expected_V: torch.Tensor) -> None:
    [completion] = output.outputs
    [token], [position] = completion.token_ids, completion.logprobs
    assert token == expected_V.argmax().item()
    assert position.logprob == pytest.approx(expected_V[token].item(), abs=1e-3)
