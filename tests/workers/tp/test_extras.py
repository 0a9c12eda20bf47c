"""Adapters with vectors of their own come and go on all ranks, within a budget that not all of them fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lorafleet.offline.llm import LoRARequest, SamplingParams
from lorafleet.protocol.lora_config import LoRAConfig
from ranks import start_llm
from tiny_models import make_adapter

ADAPTERS: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True, "r": 4},
    "another dora": {"use_dora": True, "r": 8, "target_modules": ["q_proj", "o_proj", "down_proj"]},
    "norms": {"r": 2, "modules_to_save": ["input_layernorm", "post_attention_layernorm"]},
    "bias": {"r": 2, "bias": "all"},
    "plain": {"r": 2},
}
BUDGET = 14_000  # bytes; on one rank the first needs 12,288, every output having a scale and a bias


@pytest.fixture(scope="module")
def adapters(fleet, tmp_path_factory) -> dict[str, Path]:
    root, base = tmp_path_factory.mktemp("extras"), fleet("llama_bias").base
    return {
        name: make_adapter(root / name, base, seed=i, **options) for i, (name, options) in enumerate(ADAPTERS.items())
    }


def test_answers_are_those_of_one_rank(fleet, adapters, prompt) -> None:
    config = LoRAConfig(
        max_loras=3, max_gpu_loras=3, max_cpu_loras=4, extra_memory_gib=BUDGET / 2**30, fully_sharded_loras=True
    )
    loras = [LoRARequest(name, i, str(path)) for i, (name, path) in enumerate(adapters.items(), 1)] * 3
    prompts = [{"prompt_token_ids": prompt(3 + 5 * i % 40)} for i in range(len(loras))]
    params = SamplingParams(max_tokens=6, temperature=0, logprobs=1, ignore_eos=True)
    answers, evictions = [], []
    for size in (1, 2):
        llm = start_llm(str(fleet("llama_bias").base), size, enable_lora=True, lora_config=config)
        outputs = [llm.generate(prompts, params, loras) for _ in range(2)]
        answers += [[list(output.outputs[0].token_ids) for output in of_all] for of_all in outputs]
        evictions.append(llm._engine.loras.slots.num_evictions)
        llm.close()
    assert all(found == answers[0] for found in answers)
    assert len({str(answer) for answer in answers[0]}) > 10, "adapters make no difference"
    assert min(evictions) > 3
