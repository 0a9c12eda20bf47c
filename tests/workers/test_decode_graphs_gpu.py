"""Decodes of each kind of family in CUDA graphs with the Triton backend, against the same engine without graphs: in
float32, so that the answers are equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from family_cases import CASES, make_case, make_case_adapter
from lorafleet.offline.llm import LLM, LoRARequest, RequestOutput, SamplingParams

pytestmark = pytest.mark.gpu

# Sinks; chunks; head sizes and caches by layer; streams; latent attention without and with a latent query; states.
FAMILIES = (
    "gpt_oss",
    "llama4",
    "gemma4_dense",
    "gemma4_small",
    "gemma4_experts",
    "gemma3n",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "cohere2",
    "qwen3_5",
    "qwen3_next",
    "qwen3_5_moe",
)
LENGTHS = (3, 45, 17, 150, 1)
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)


def answers(base: Path, adapter: Path, prompt, eager: bool) -> list[RequestOutput]:
    llm = LLM(
        str(base),
        dtype="float32",
        enable_lora=True,
        attention_backend="triton",
        enforce_eager=eager,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        kv_cache_tokens=4096,
    )
    graphs = llm._engine.runner.steps.decode_graphs
    assert (graphs is None) == eager
    if graphs is not None:
        assert graphs.find([-1], [1]) is not None, "the attention has no graphs"
    jobs = [(prompt(length), own) for length in LENGTHS for own in (None, LoRARequest("a", 1, str(adapter)))]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids, _ in jobs], PARAMS, [own for _, own in jobs])
    llm.close()
    return outputs


@pytest.mark.parametrize("name", FAMILIES)
def test_graphs_answer_as_steps_without_them_do(tmp_path: Path, prompt, name: str) -> None:
    base = make_case(tmp_path / "base", CASES[name])
    adapter = make_case_adapter(tmp_path / "adapter", base, CASES[name])
    expected = answers(base, adapter, prompt, eager=True)
    for found, wanted in zip(answers(base, adapter, prompt, eager=False), expected, strict=True):
        [mine], [other] = found.outputs, wanted.outputs
        assert mine.token_ids == other.token_ids
        assert [p.logprob for p in mine.logprobs] == pytest.approx([p.logprob for p in other.logprobs], abs=1e-3)
