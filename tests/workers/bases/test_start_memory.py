"""A start takes the memory of the weights that are served and at most one layer more, whatever the format.

Bytes of live tensors are counted, so the tests are exact. Codes are random: any bits are valid ones.
"""

# D in · O out

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from float_checkpoints import compressed, group
from lorafleet.protocol.quantization_methods import Method
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.quantization import resolved
from lorafleet.workers.bases.weights import load_weights
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.tp.group import TPGroup

HIDDEN, INNER, VOCAB = 1024, 4096, 64
SHAPES = {
    **{f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"},
    **{f"mlp.{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")},
    "mlp.down_proj": (HIDDEN, INNER),
}
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "eos_token_id": 2,
}
Tensors = dict[str, Tensor]


def ints(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)


def byte(*shape: int) -> Tensor:
    return torch.randint(0, 120, shape, dtype=torch.uint8)


def halves(*shape: int) -> Tensor:
    return torch.full(shape, 0.01, dtype=torch.float16)


def gptq(rows: int, columns: int) -> Tensors:
    order = torch.randperm(columns).int() // 128
    groups = columns // 128
    zeros = ints(groups, rows // 8)
    return {"qweight": ints(columns // 8, rows), "qzeros": zeros, "scales": halves(groups, rows), "g_idx": order}


def awq(rows: int, columns: int) -> Tensors:
    groups = columns // 128
    return {"qweight": ints(columns, rows // 8), "qzeros": ints(groups, rows // 8), "scales": halves(groups, rows)}


def packed(rows: int, columns: int) -> Tensors:
    shape = torch.tensor([rows, columns])
    return {
        "weight_packed": ints(rows, columns // 8),
        "weight_scale": halves(rows, columns // 128),
        "weight_shape": shape,
    }


def e4m3(rows: int, columns: int) -> Tensors:
    return {"weight": byte(rows, columns).view(torch.float8_e4m3fn), "weight_scale": torch.ones(rows, 1)}


def nvfp4(rows: int, columns: int) -> Tensors:
    scale = byte(rows, columns // 16).view(torch.float8_e4m3fn)
    return {"weight_packed": byte(rows, columns // 2), "weight_scale": scale, "weight_global_scale": torch.ones(1)}


def nf4(rows: int, columns: int) -> Tensors:
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [rows, columns]}
    return {
        "weight": byte(rows * columns // 2, 1),
        "weight.absmax": torch.ones(rows * columns // 64),
        "weight.quant_map": torch.linspace(-1, 1, 16),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


def int8(rows: int, columns: int) -> Tensors:
    return {"weight": byte(rows, columns).view(torch.int8), "SCB": torch.ones(rows)}


FOUR = {"bits": 4, "group_size": 128}
PACKED = group(4, "int", "group", inputs=False, group_size=128) | {"format": "pack-quantized"}
STORED: dict[str, tuple[Callable[[int, int], Tensors], dict[str, Any]]] = {
    "gptq": (gptq, FOUR | {"quant_method": "gptq", "sym": False, "desc_act": True}),
    "awq": (awq, FOUR | {"quant_method": "awq", "version": "gemm", "zero_point": True}),
    "pack-quantized": (packed, compressed({"all": PACKED}, [])),
    "fp8": (e4m3, compressed({"all": group(8, "float", "channel")}, [])),
    "nvfp4": (nvfp4, compressed({"all": group(4, "float", "tensor_group", inputs=False, group_size=16)}, [])),
    "bitsandbytes, 4 bits": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "bitsandbytes, 8 bits": (int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}


def plain(rows: int, columns: int) -> Tensors:
    return {"weight": torch.empty(rows, columns, dtype=torch.bfloat16).uniform_(-1, 1)}


def checkpoint(
    folder: Path, pack: Callable[[int, int], Tensors], config: dict[str, Any], count: int, skip: str
) -> Path:
    """Writes the checkpoint in `count` files. Linears whose names end in `skip` are plain."""
    norms = ["layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"]
    tensors = {f"model.{name}.weight": torch.ones(HIDDEN, dtype=torch.bfloat16) for name in norms}
    tensors |= {f"model.embed_tokens.{leaf}": tensor for leaf, tensor in plain(VOCAB, HIDDEN).items()}
    for name, shape in SHAPES.items():
        made = plain(*shape) if skip and name.endswith(skip) else pack(*shape)
        tensors |= {f"model.layers.0.{name}.{leaf}": tensor for leaf, tensor in made.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    if count == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    parts = {f"part-{index}.safetensors": sorted(tensors)[index::count] for index in range(count)}
    for file, names in parts.items():
        save_file({name: tensors[name] for name in names}, folder / file)
    weight_map = {name: file for file, names in parts.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def started(folder: Path, method: Method | None) -> DecoderModel:
    config = read_model_config(folder)
    config = replace(config, quantization=resolved(config.quantization, method))
    model = DecoderModel(config, TPGroup(0, 1), torch.bfloat16, torch.device("cpu"))
    with torch.inference_mode():
        load_weights(model, folder)
    return model


def size_of(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def peak_bytes(seen: profile, folder: Path) -> int:
    """Returns the largest number of live bytes.

    The profiler counts a file of `folder` that is mapped like a tensor, once and whole. It is the page cache's memory.
    """
    files = {path.stat().st_size for path in folder.glob("*.safetensors")}
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if abs(event.nbytes()) not in files:
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def assert_small_peak(folder: Path, method: Method | None = None) -> None:
    """Loads the checkpoint, and compares the largest number of live bytes with those of the result and of a layer."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        model = started(folder, method)
    assert size_of(model) <= peak_bytes(seen, folder) <= size_of(model) + size_of(model.layers[0])


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("method", [None, "nf4", "int4", "fp8"])
def test_a_plain_checkpoint_is_quantized_within_the_memory_of_the_result(tmp_path, method, files) -> None:
    assert_small_peak(checkpoint(tmp_path / "model", plain, {}, files, ""), method)


@pytest.mark.parametrize("form", list(STORED))
def test_a_quantized_checkpoint_is_read_within_the_memory_of_the_result(tmp_path, form) -> None:
    pack, config = STORED[form]
    assert_small_peak(checkpoint(tmp_path / "model", pack, {"quantization_config": config}, 1, ""))


@pytest.mark.parametrize("form", ["gptq", "bitsandbytes, 4 bits", "nvfp4"])
def test_linears_that_must_be_dequantized_are_so_some_rows_at_a_time(tmp_path, form) -> None:
    """up_proj is stored plain, so gate_proj, which shares its weight, is dequantized."""
    pack, config = STORED[form]
    assert_small_peak(checkpoint(tmp_path / "model", pack, {"quantization_config": config}, 1, "up_proj"))
