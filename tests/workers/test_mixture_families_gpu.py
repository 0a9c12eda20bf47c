"""The mixtures of family_cases.py on a GPU in float32: logprobs of the base and of an adapter against transformers and
PEFT on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from family_cases import CASES, make_case, make_case_adapter
from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from tiny_models import Reference

pytestmark = pytest.mark.gpu

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
MIXTURES = "gpt_oss", "glm4_moe", "llama4", "qwen2_moe", "granite_moe", "ernie_moe", "hunyuan_moe", "minimax_m2"


@pytest.mark.parametrize("name", MIXTURES)
def test_kernels_answer_as_transformers_and_peft_do(tmp_path: Path, prompt, name: str) -> None:
    base = make_case(tmp_path / "base", CASES[name])
    adapter = make_case_adapter(tmp_path / "adapter", base, CASES[name])
    llm = LLM(str(base), dtype="float32", enable_lora=True, attention_backend="triton", kv_cache_tokens=2048)
    jobs = [(prompt(length), own) for length in (3, 45) for own in (None, adapter)]
    requests = [None if own is None else LoRARequest("a", 1, str(own)) for _, own in jobs]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids, _ in jobs], PARAMS, lora_request=requests)
    reference = Reference(base)
    for (ids, own), output in zip(jobs, outputs, strict=True):
        [completion] = output.outputs
        expected = reference.logprobs([*ids, *completion.token_ids], own)[len(ids) - 1 :]
        assert [p.logprob for p in completion.logprobs] == pytest.approx(expected, abs=0.03)
