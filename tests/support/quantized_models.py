"""Makes checkpoints with quantized linears from plain ones, and plain ones with the quantized values."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lorafleet.kernels.quant.nf4 import NF4_BOOK


def rounded_to_nf4(weight: Tensor) -> Tensor:
    """Rounds each number to the nearest of the codebook times its block's largest magnitude; a block has 64 numbers."""
    book, found = torch.tensor(NF4_BOOK), []
    for block in weight.float().flatten().split(64):
        largest = block.abs().max()
        found.append(book[(block[:, None] / largest - book).abs().argmin(dim=1)] * largest)
    return torch.cat(found).view(weight.shape).to(weight.dtype)


def rounded_to_fp8(weight: Tensor) -> Tensor:
    scale = weight.float().abs().amax(dim=1, keepdim=True) * (1 / 448)
    return ((weight.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(weight.dtype)


ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {"nf4": rounded_to_nf4, "fp8": rounded_to_fp8}


def is_linear(name: str) -> bool:
    """Returns whether the name is that of a linear of the decoder."""
    return name.endswith("_proj.weight")


def with_values(model: Path, folder: Path, rounded: Callable[[Tensor], Tensor]) -> Path:
    """Writes the plain checkpoint with the values of its quantized version."""
    return written(model, folder, lambda name, w: {name: rounded(w) if is_linear(name) else w}, {})


def bitsandbytes_checkpoint(
    model: Path, folder: Path, kind: str = "nf4", nested: bool = True, skipped: str = "lm_head"
) -> tuple[Path, Path]:
    """Writes a checkpoint that bitsandbytes quantized, as transformers saves it, and the plain one of its values.

    Modules whose names contain one of `skipped` are left alone.
    """
    from bitsandbytes import functional

    values: dict[str, Tensor] = {}

    def entries(name: str, weight: Tensor) -> dict[str, Tensor]:
        if not is_linear(name) or skipped in name:
            return {name: weight}
        packed, state = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
        values[name] = _values_of(packed, state).view(weight.shape)
        return {name: packed} | {f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}

    config = {
        "quant_method": "bitsandbytes",
        "_load_in_4bit": True,
        "load_in_4bit": True,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": nested,
        "bnb_4bit_compute_dtype": "float32",
        "llm_int8_skip_modules": [skipped],
    }
    written(model, folder, entries, {"quantization_config": config})
    plain = folder.with_name(f"{folder.name}-values")
    return folder, written(model, plain, lambda name, w: {name: values.get(name, w)}, {})


def _values_of(packed: Tensor, state: Any) -> Tensor:
    """Returns what bitsandbytes' 4-bit codes stand for, as one row. Its own kernel for CPUs with AVX-512 returns other
    values for rows that blocks do not divide."""
    from bitsandbytes import functional

    scales = state.absmax
    if state.nested:
        scales = functional.dequantize_blockwise(scales, state.state2) + state.offset
    codes = torch.stack((packed.flatten() >> 4, packed.flatten() & 15), dim=1).flatten().long()
    values = state.code[codes] * scales.repeat_interleave(state.blocksize)[: len(codes)]
    return values.to(state.dtype)


def compressed_checkpoint(model: Path, folder: Path) -> Path:
    """Writes a checkpoint as llm-compressor's FP8_DYNAMIC, with the values of with_values(…, rounded_to_fp8)."""

    def entries(name: str, weight: Tensor) -> dict[str, Tensor]:
        if not is_linear(name):
            return {name: weight}
        scale = weight.float().abs().amax(dim=1, keepdim=True) * (1 / 448)
        return {name: (weight.float() / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}

    eight = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None}
    group = {
        "targets": ["Linear"],
        "weights": eight | {"strategy": "channel", "dynamic": False},
        "input_activations": eight | {"strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    return written(model, folder, entries, {"quantization_config": config})


def with_config(model: Path, folder: Path, **changes: Any) -> Path:
    return written(model, folder, lambda name, w: {name: w}, changes)


def written(
    model: Path, folder: Path, entries: Callable[[str, Tensor], dict[str, Tensor]], changes: dict[str, Any]
) -> Path:
    shutil.copytree(model, folder)
    path = folder / "model.safetensors"
    tensors: dict[str, Tensor] = {}
    for name, weight in load_file(path).items():
        tensors |= entries(name, weight)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder
