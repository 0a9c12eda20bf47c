"""The engine with lora_dtype=fp8: its answers are those of the rounded adapter."""

from __future__ import annotations

import pytest
import torch

from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from lorafleet.protocol.errors import ConfigError
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.workers.auto_options import lora_dtype
from tiny_models import rounded_to_fp8


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_answers_are_those_of_the_rounded_adapter(fleet, prompt, tmp_path, family):
    made = fleet(family)
    llm = LLM(str(made.base), enable_lora=True, lora_dtype="fp8", kv_cache_tokens=2048)
    ids = prompt(60)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    kinds = ("all", "qv")
    loras = [LoRARequest(kind, i + 1, str(made.adapters[kind])) for i, kind in enumerate(kinds)]
    outputs = llm.generate([{"prompt_token_ids": ids}] * 2, params, loras)
    for kind, output in zip(kinds, outputs, strict=True):
        found = [p.logprob for p in output.prompt_logprobs[1:]]
        same = rounded_to_fp8(made.adapters[kind], tmp_path / kind)
        assert found == pytest.approx(made.reference.logprobs(ids, same), abs=1e-3)
        exact = made.reference.logprobs(ids, made.adapters[kind])
        assert max(abs(a - b) for a, b in zip(found, exact, strict=True)) > 1e-3
        assert sum(abs(a - b) for a, b in zip(found, exact, strict=True)) / len(exact) < 0.2


def test_an_older_gpu_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A40")
    with pytest.raises(ConfigError, match=r"lora_dtype=fp8 needs .* 8\.9 .*NVIDIA A40 is older.*lora_dtype=auto"):
        lora_dtype(LoRAConfig(lora_dtype="fp8"), torch.bfloat16, torch.device("cuda"))
    assert lora_dtype(LoRAConfig(), torch.bfloat16, torch.device("cuda")) is torch.bfloat16
