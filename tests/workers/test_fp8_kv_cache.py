"""The engine with kv_cache_dtype=fp8: its answers, what the cache holds, the checkpoint's scales."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from lorafleet.kernels.lora.lora_batch import BASE_SLOT
from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import ConfigError, UnsupportedModel
from lorafleet.workers import auto_options, kv_cache_sizing
from lorafleet.workers.attention.xqa_attention import XQAAttention
from lorafleet.workers.startup import build_engine
from tiny_models import Reference, make_model

GPU_SHAPE = {
    "hidden_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "initializer_range": 0.05,
    "num_hidden_layers": 3,
    "max_position_embeddings": 1024,
}
KV_SCALE = {"k": 0.0625, "v": 0.015625}
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@pytest.fixture
def model(fleet, tmp_path):
    shutil.copytree(fleet("llama3").base, tmp_path / "model")
    return tmp_path / "model"


def add_tensors(model, tensors: dict[str, float], **config) -> None:
    path = model / "model.safetensors"
    stored = {name: torch.tensor(value) for name, value in tensors.items()}
    save_file(load_file(path) | stored, path)
    edited = json.loads((model / "config.json").read_text()) | config
    (model / "config.json").write_text(json.dumps(edited))


def scales_of(model, dtype: str = "fp8") -> list[tuple[float, float]]:
    engine = build_engine(EngineConfig(model=str(model), kv_cache_tokens=64, kv_cache_dtype=dtype))
    return [(round(cache.k_scale, 4), round(cache.v_scale, 4)) for cache in engine.runner.steps.caches]


class RoundedCache(DynamicCache):
    """transformers' own, but for what float8 cannot hold."""

    def __init__(self, k_scale: float, v_scale: float) -> None:
        super().__init__()
        self.scales = k_scale, v_scale

    def update(self, key_states, value_states, *args, **kwargs):
        k, v = (
            (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale
            for x, scale in zip((key_states, value_states), self.scales, strict=True)
        )
        return super().update(k, v, *args, **kwargs)


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.03, 0.01)])
def test_answers_are_those_of_transformers_over_a_rounded_cache(model, fleet, prompt, scales):
    if scales != (1.0, 1.0):
        kinds = dict(zip("kv", scales, strict=True))
        layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
        names = {f"model.layers.{i}.self_attn.{kind}_scale": kinds[kind] for i in range(layers) for kind in kinds}
        add_tensors(model, names)
    llm = LLM(
        str(model),
        enable_lora=True,
        kv_cache_tokens=2048,
        kv_cache_dtype="fp8",
        max_num_batched_tokens=48,
        max_num_seqs=8,
    )
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0)
    reference = Reference(fleet("llama3").base)
    for i, name in enumerate((None, "all")):
        path = None if name is None else fleet("llama3").adapters[name]
        lora = None if path is None else LoRARequest(name, i + 1, str(path))
        tokens = prompt(90)
        for _ in range(2):  # the second time the prompt's blocks are known
            completion = llm.generate({"prompt_token_ids": tokens}, params, lora)[0].outputs[0]
            found = torch.tensor([entry.logprob for entry in completion.logprobs])
            cache = RoundedCache(*scales)
            truth, exact = (
                torch.tensor(reference.logprobs(tokens + completion.token_ids, path, used)[len(tokens) - 1 :])
                for used in (cache, None)
            )
            assert (found - truth).abs().mean() < 1e-3  # of a number that rounds to the other of its two neighbors
            assert 1e-2 < (found - exact).abs().mean() < 0.2
    assert llm._engine.stats().prefix_cache_hits_total > 0


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # FlashInfer and its compiler warn as they please
@pytest.mark.parametrize(("backend", "eager"), [("flashinfer", False), ("flashinfer", True), ("triton", True)])
def test_on_a_gpu_the_error_is_that_of_transformers_in_bf16(tmp_path, prompt, backend, eager):
    pytest.importorskip(backend)
    base = make_model(tmp_path / "wide", "llama3", dtype="bfloat16", **GPU_SHAPE)
    add_tensors(base, {f"model.layers.{i}.self_attn.{kind}_scale": KV_SCALE[kind] for i in range(3) for kind in "kv"})
    llm = LLM(
        str(base),
        attention_backend=backend,
        enforce_eager=eager,
        kv_cache_tokens=8192,
        kv_cache_dtype="fp8",
        max_num_batched_tokens=256,
        max_num_seqs=16,
    )
    graphs = llm._engine.runner.steps.decode_graphs
    assert (graphs is None) == eager
    rounds_queries = backend == "flashinfer" and torch.cuda.get_device_capability() == (9, 0)
    if graphs is not None and rounds_queries:
        graph = graphs.find([BASE_SLOT], [1])
        assert graph is not None
        assert isinstance(graph.attention, XQAAttention)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
    prompts = [prompt(n) for n in (5, 40, 100, 300)]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
    exact, half = Reference(base, device="cuda"), Reference(base, dtype=torch.bfloat16, device="cuda")
    errors = []
    for p, output in zip(prompts, outputs, strict=True):
        tokens = p + output.outputs[0].token_ids
        found = torch.tensor([entry.logprob for entry in output.outputs[0].logprobs])
        truth, theirs, unrounded = (
            torch.tensor(reference.logprobs(tokens, cache=cache)[len(p) - 1 :])
            for reference, cache in (
                (exact, RoundedCache(*KV_SCALE.values())),
                (half, RoundedCache(*KV_SCALE.values())),
                (exact, None),
            )
        )
        pairs = (found, truth), (theirs, truth), (found, unrounded), (truth, unrounded)
        errors.append([(x - y).abs().mean().item() for x, y in pairs])
    ours, bf16, to_exact, cache = torch.tensor(errors).mean(0).tolist()
    print(
        f"{backend} {eager=}: error {ours:.4f}, of transformers in bf16 {bf16:.4f}, to an exact cache {to_exact:.4f}, "
        f"of the cache's rounding {cache:.4f}"
    )
    if rounds_queries:
        # FlashInfer's XQA also rounds queries and weights to e4m3. That may cost as much as rounding the cache.
        assert ours < math.hypot(1.2 * bf16, cache) + 0.002
    else:
        assert ours < 1.5 * bf16 + 0.002


@pytest.mark.parametrize(("dtype", "times"), [("bfloat16", 2), ("float32", 4)])
def test_the_same_memory_holds_more_tokens(model, monkeypatch, dtype, times):
    monkeypatch.setattr(kv_cache_sizing, "CPU_CACHE_BYTES", 1 << 20)

    def tokens(kv: str) -> int:
        return build_engine(EngineConfig(model=str(model), dtype=dtype, kv_cache_dtype=kv)).hello.kv_cache_tokens

    block = EngineConfig("m").block_size
    assert 0 <= tokens("fp8") - times * tokens("auto") < times * block


def test_an_older_gpu_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    with pytest.raises(ConfigError, match=r"kv_cache_dtype=fp8 needs .* 8\.9 .*NVIDIA A100 is older.*auto"):
        auto_options.kv_dtype(EngineConfig("m", kv_cache_dtype="fp8"), torch.bfloat16, torch.device("cuda"))


@pytest.mark.parametrize(
    "names",
    [
        ("{}_scale", "{}_scale"),
        ("attn.{}_scale", "attn.{}_scale"),
        ("k_proj.{}_scale", "v_proj.{}_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
def test_the_checkpoints_scales_are_used(model, names):
    layers = len(scales_of(model))
    add_tensors(
        model,
        {
            f"model.layers.{i}.self_attn.{name.format(kind)}": at + i
            for i in range(layers)
            for name, kind, at in zip(names, "kv", (0.25, 0.5), strict=True)
        },
        quantization_config={"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME},
    )
    assert scales_of(model) == [(0.25 + i, 0.5 + i) for i in range(layers)]
    assert scales_of(model, "auto") == [(1.0, 1.0)] * layers


def test_one_scale_may_serve_keys_and_values(model):
    layers = len(scales_of(model))
    add_tensors(model, {f"model.layers.{i}.self_attn.kv_scale": 0.125 for i in range(layers)})
    assert scales_of(model) == [(0.125, 0.125)] * layers


def test_scales_that_are_no_scales_or_too_few_are_refused(model):
    add_tensors(model, {"model.layers.0.self_attn.k_scale": 0.1})
    with pytest.raises(ConfigError, match=r"some layers only: layer 0's v_scale"):
        scales_of(model)
    add_tensors(model, {"model.layers.0.self_attn.k_scale": -1.0})
    with pytest.raises(ConfigError, match=r"k_scale must be one positive number"):
        scales_of(model)


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "fp8"},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {}}, "kv_cache_scheme": SCHEME},
        {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME | {"num_bits": 4}},
    ],
)
def test_any_other_quantization_stays_refused(model, config):
    add_tensors(model, {}, quantization_config=config)
    with pytest.raises(UnsupportedModel, match="quantization_config"):
        scales_of(model)
