"""Mixtures of experts on a GPU in float32, with and without CUDA graphs, against the same engine on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lorafleet.offline.llm import LLM, LoRARequest, RequestOutput, SamplingParams
from tiny_models import make_layered_adapter, make_model

pytestmark = pytest.mark.gpu
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


def without_experts(adapter: Path) -> Path:
    """Leaves the adapter its attention alone."""
    weights, config = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    save_file({name: tensor for name, tensor in load_file(weights).items() if "q_proj" in name}, weights)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"target_modules": ["q_proj"]}))
    return adapter


def test_captured_steps_launch_kernels_for_adapters_on_experts_only_where_there_are_any(tmp_path: Path, prompt) -> None:
    model = make_model(tmp_path / "model", "mixtral")
    on_experts = make_layered_adapter(tmp_path / "experts", model)
    attention_only = without_experts(make_layered_adapter(tmp_path / "attention", model, seed=2))
    llm = LLM(str(model), device="cuda", dtype="float32", enable_lora=True, max_loras=2, kv_cache_tokens=4096)
    inputs = [{"prompt_token_ids": prompt(n)} for n in (5, 17)]
    counts = []
    for i, path in enumerate((attention_only, on_experts)):
        request = LoRARequest(path.name, i + 1, str(path))
        llm.generate(inputs, PARAMS, lora_request=[request, request])
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            llm.generate(inputs, PARAMS, lora_request=[request, request])
        events = {event.key: event.count for event in profile.key_averages()}
        counts.append(sum(count for name, count in events.items() if "_adapted_activation_kernel" in name))
    llm.close()
    assert counts[0] == 0 < counts[1]
