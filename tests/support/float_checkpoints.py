"""Makes checkpoints of 8-bit codes and 4-bit floats as libraries write them, and plain ones with the same values.

Values are computed block by block from what is stored. Codes and scales need not be good ones for the weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantized_models import is_linear, written

FP8 = torch.float8_e4m3fn
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
BLOCK = (24, 48)  # does not divide the tiny models' sizes; ranks' parts begin inside blocks
Packed = tuple[dict[str, Tensor], Tensor]  # tensors by their names below the linear, and the values
Pack = Callable[[Tensor], Packed]


def scaled(
    weight: Tensor, block: tuple[int, int], dtype: torch.dtype, leaf: str = "weight_scale", shape: tuple[int, ...] = ()
) -> Packed:
    """Blocks of this many rows and columns. shape: that of the stored scales, with -1 for the default."""
    largest = 448.0 if dtype == FP8 else 127.0
    tiles = [rows.split(block[1], 1) for rows in weight.float().split(block[0])]
    scale = torch.stack([torch.stack([tile.abs().max() / largest for tile in row]) for row in tiles])
    codes = [
        [tile / s if dtype == FP8 else (tile / s).round() for tile, s in zip(row, scales, strict=True)]
        for row, scales in zip(tiles, scale, strict=True)
    ]
    stored = torch.cat([torch.cat(row, 1) for row in codes]).to(dtype)
    columns = torch.arange(weight.shape[1]) // block[1]
    values = stored.float() * scale[torch.arange(len(weight)) // block[0]][:, columns]
    return {"weight": stored, leaf: scale.view(shape) if shape else scale}, values


def four_bits(weight: Tensor, group: int, scale_of: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns bytes with the first of two codes in the lower bits, scale_of(each group's ideal scale), and codes'
    values without scale."""
    grouped = weight.float().view(len(weight), -1, group)
    scale = scale_of(grouped.abs().amax(dim=2) / 6)
    code = (grouped[..., None] / scale.float()[:, :, None, None] - torch.tensor(E2M1)).abs().argmin(dim=-1).flatten(1)
    return (code[:, ::2] + 16 * code[:, 1::2]).to(torch.uint8), scale, torch.tensor(E2M1)[code]


def nvfp4(weight: Tensor, packed: str, second: str, divides: bool) -> Packed:
    factor = weight.float().abs().max() / 6 / 448
    codes, scale, plain = four_bits(weight, 16, lambda ideal: (ideal / factor).to(FP8).float() * factor)
    stored = (scale / factor).to(FP8)
    own = 1 / factor if divides else factor
    first = stored.float() / own if divides else stored.float() * own
    values = plain * first.repeat_interleave(16, dim=1)
    return {packed: codes, "weight_scale": stored, second: own.view(1) if divides else own}, values


def mxfp4(weight: Tensor) -> Packed:
    codes, scale, plain = four_bits(weight, 32, lambda ideal: 2 ** ideal.log2().ceil())
    stored = (scale.log2() + 127).to(torch.uint8)
    return {"weight_packed": codes, "weight_scale": stored}, plain * scale.repeat_interleave(32, dim=1)


def mxfp8(weight: Tensor) -> Packed:
    grouped = weight.float().view(len(weight), -1, 32)
    exponent = (grouped.abs().amax(dim=2) / 448).log2().ceil()
    codes = (grouped / 2 ** exponent[:, :, None]).to(FP8)
    stored = (exponent + 127).to(torch.uint8)
    return {"weight": codes.flatten(1), "weight_scale": stored}, (codes.float() * 2 ** exponent[:, :, None]).flatten(1)


def whole(weight: Tensor) -> tuple[int, int]:
    return weight.shape[0], weight.shape[1]


def with_inputs(packed: Packed, leaf: str = "input_scale") -> Packed:
    return packed[0] | {leaf: torch.tensor(0.25)}, packed[1]


def int8_of_bitsandbytes(weight: Tensor) -> Packed:
    largest = weight.float().abs().amax(dim=1)
    codes = (weight.float() * 127 / largest[:, None]).round().to(torch.int8)
    values = codes.float() * (largest * (1 / 127))[:, None]
    return {"weight": codes, "SCB": largest, "weight_format": torch.zeros((), dtype=torch.uint8)}, values


def compressed(groups: dict[str, dict[str, Any]], ignore: list[str]) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head", *ignore]}


def group(
    bits: int, kind: str, strategy: str, target: str = "Linear", inputs: bool = True, **more: Any
) -> dict[str, Any]:
    numbers = {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False}
    return {
        "targets": [target],
        "weights": numbers | {"strategy": strategy} | more,
        "input_activations": numbers | {"strategy": "token", "dynamic": True} if inputs else None,
        "output_activations": None,
    }


def mixed(name: str, weight: Tensor) -> Packed:
    """Rows for attention, and NVFP4 for MLPs; q/k/v of layer 1 have three kinds of scales."""
    if "mlp" in name:
        return nvfp4(weight, "weight_packed", "weight_global_scale", divides=True)
    kinds = {"layers.1.self_attn.k_proj": BLOCK, "layers.1.self_attn.v_proj": whole(weight)}
    block = next((block for module, block in kinds.items() if module in name), (1, weight.shape[1]))
    return scaled(weight, block, FP8)


MIXED_GROUPS = {
    "rows": group(8, "float", "channel"),
    "blocks": group(8, "float", "block", "re:.*layers.1.self_attn.k_proj", False, block_structure=list(BLOCK)),
    "tensors": group(8, "float", "tensor", "model.layers.1.self_attn.v_proj"),
    "mlp": group(4, "float", "tensor_group", r"re:.*mlp\..*", False, group_size=16),
}
PLAIN_LINEAR = "model.layers.0.self_attn.o_proj"
DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
MODELOPT = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}}
NVFP4_SETTINGS = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.layers.0.*o_proj"]}
# The settings of a linear, or of all in a module.
MODELOPT_MIXED = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "kv_cache_scheme": "FP8",
    "quantized_layers": {
        f"model.layers.{layer}.{module}": {"quant_algo": algorithm, "group_size": size}
        for layer in range(2)
        for module, algorithm, size in (
            ("mlp", "NVFP4", 16),
            ("self_attn", "FP8", None),
            ("self_attn.q_proj", "fp8_per_channel_per_token", None),
        )
    },
}

# For each form: how it stores a linear, what config.json says, and linears that stay plain.
FORMS: dict[str, tuple[Callable[[str, Tensor], Packed], dict[str, Any], str]] = {
    "compressed-tensors, FP8 static": (
        lambda _, w: with_inputs(scaled(w, whole(w), FP8, shape=(1,))),
        compressed({"group_0": group(8, "float", "tensor")}, []),
        "",
    ),
    "compressed-tensors, W8A8": (
        lambda _, w: scaled(w, (1, w.shape[1]), torch.int8),
        compressed({"group_0": group(8, "int", "channel")}, []),
        "",
    ),
    "compressed-tensors, MXFP4": (
        lambda _, w: mxfp4(w),
        compressed({"group_0": group(4, "float", "group", inputs=False, group_size=32)}, []),
        "",
    ),
    "compressed-tensors, MXFP8": (
        lambda _, w: mxfp8(w),
        compressed({"group_0": group(8, "float", "group", group_size=32)}, []),
        "",
    ),
    "compressed-tensors, mixed": (mixed, compressed(MIXED_GROUPS, [PLAIN_LINEAR]), PLAIN_LINEAR),
    "fp8, blocks": (
        lambda _, w: scaled(w, BLOCK, FP8, "weight_scale_inv"),
        DEEPSEEK | {"modules_to_not_convert": [PLAIN_LINEAR]},
        PLAIN_LINEAR,
    ),
    "fp8, static": (
        lambda _, w: with_inputs(scaled(w, whole(w), FP8, shape=(1,))),
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        "",
    ),
    "fp8, FBGEMM": (
        lambda _, w: with_inputs(scaled(w, (1, w.shape[1]), FP8), "input_scale_ub"),
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": [PLAIN_LINEAR]},
        PLAIN_LINEAR,
    ),
    "modelopt, FP8": (lambda _, w: with_inputs(scaled(w, whole(w), FP8, shape=(1,))), MODELOPT, ""),
    "modelopt, NVFP4": (
        lambda _, w: with_inputs(nvfp4(w, "weight", "weight_scale_2", divides=False)),
        NVFP4_SETTINGS,
        PLAIN_LINEAR,
    ),
    "modelopt, mixed": (
        lambda name, w: (
            nvfp4(w, "weight", "weight_scale_2", divides=False)
            if "mlp" in name
            else scaled(w, (1, w.shape[1]) if "q_proj" in name else whole(w), FP8)
        ),
        MODELOPT_MIXED,
        "",
    ),
    "bitsandbytes, 8 bits": (
        lambda _, w: int8_of_bitsandbytes(w),
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0},
        "",
    ),
}


def float_checkpoint(model: Path, folder: Path, form: str) -> tuple[Path, Path]:
    """Writes the checkpoint in this form, and the plain one of its values."""
    pack, config, plain = FORMS[form]
    values: dict[str, Tensor] = {}

    def entries(name: str, weight: Tensor) -> dict[str, Tensor]:
        module = name.removesuffix(".weight")
        if not is_linear(name) or module == plain:
            return {name: weight}
        tensors, values[name] = pack(name, weight)
        return {f"{module}.{leaf}": tensor for leaf, tensor in tensors.items()}

    in_own_file = config is MODELOPT
    written(model, folder, entries, {} if in_own_file else {"quantization_config": config})
    if in_own_file:
        (folder / "hf_quant_config.json").write_text(json.dumps(config))
    return folder, written(model, folder.with_name(f"{folder.name}-values"), lambda n, w: {n: values.get(n, w)}, {})
