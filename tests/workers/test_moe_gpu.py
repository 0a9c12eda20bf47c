"""Mixtures of experts on a GPU in float32, with and without CUDA graphs, against the same engine on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lorafleet.offline.llm import LLM, LoRARequest, RequestOutput, SamplingParams
from tiny_models import make_layered_adapter, make_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
ADAPTERS = {"a": {}, "b": {"rank_pattern": {"w2": 1, "down_proj": 1}}, "c": {"r": 17}}
PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=0)


def answers(
    model: Path, adapters: list[Path], device: str, prompts: list[list[int]], eager: bool
) -> list[RequestOutput]:
    llm = LLM(
        str(model),
        device=device,
        dtype="float32",
        enable_lora=True,
        max_loras=4,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        kv_cache_tokens=4096,
        enforce_eager=eager,
    )
    loras = [None, *(LoRARequest(path.name, i + 1, str(path)) for i, path in enumerate(adapters))]
    chosen = [loras[i % len(loras)] for i in range(len(prompts))]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], PARAMS, lora_request=chosen)
    llm.close()
    return outputs


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("eager", [False, True])
def test_answers_are_those_of_the_cpu(tmp_path: Path, prompt, family: str, eager: bool) -> None:
    model = make_model(tmp_path / "model", family)
    adapters = [
        make_layered_adapter(tmp_path / name, model, seed=i, **options)
        for i, (name, options) in enumerate(ADAPTERS.items())
    ]
    prompts = [prompt(n) for n in (1, 5, 17, 40, 60, 3, 33, 21, 9, 50, 2, 70)]
    expected = answers(model, adapters, "cpu", prompts, eager)
    for mine, theirs in zip(answers(model, adapters, "cuda", prompts, eager), expected, strict=True):
        assert mine.outputs[0].token_ids == theirs.outputs[0].token_ids
        found = [p.logprob for p in mine.outputs[0].logprobs]
        assert found == pytest.approx([p.logprob for p in theirs.outputs[0].logprobs], abs=1e-3)
