"""Makes checkpoints of integer codes by the libraries' specifications, and plain ones with their values.

The packing is written number by number, so that it shares nothing with the code that is tested.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantized_models import is_linear


@dataclass
class Codes:
    """The codes of one linear, made with random zeros and orders."""

    bits: int
    code_OD: Tensor
    scale_OG: Tensor  # float16
    zero_OG: Tensor
    group_D: Tensor

    @property
    def values(self) -> Tensor:
        """Returns the values as the libraries compute them: in the scales' dtype."""
        dtype = self.scale_OG.dtype
        difference_OD = self.code_OD.to(dtype) - self.zero_OG.to(dtype)[:, self.group_D]
        return difference_OD * self.scale_OG[:, self.group_D]


@dataclass
class Case:
    """A way to quantize a checkpoint. `entries` makes a linear's tensors from its codes."""

    entries: Callable[[Codes], dict[str, Tensor]]
    config: dict[str, Any]
    bits: int = 4
    group: int = 32  # -1 for whole rows
    symmetric: bool = False
    ordered: bool = False
    plain: str = "lm_head"  # linears that match stay plain
    other: dict[str, dict[str, int]] = field(default_factory=dict)  # bits or group of linears that match a pattern

    def codes(self, name: str, weight: Tensor) -> Codes:
        own = {"bits": self.bits, "group": self.group}
        for pattern, changes in self.other.items():
            own |= changes if re.search(pattern, name) else {}
        outputs, inputs = weight.shape
        size, top = inputs if own["group"] == -1 else own["group"], 2 ** own["bits"] - 1
        generator = torch.Generator().manual_seed(len(name) + sum(name.encode()))
        group_D = torch.arange(inputs) // size
        if self.ordered:
            group_D = group_D[torch.randperm(inputs, generator=generator)]
        zero_OG = torch.full((outputs, inputs // size), (top + 1) // 2)
        if not self.symmetric:
            zero_OG = torch.randint(0, top + 1, zero_OG.shape, generator=generator)
        scale_OG = torch.empty(zero_OG.shape).uniform_(0.5, 1, generator=generator) * 0.6 / top
        scale_OG = scale_OG.half()
        code_OD = (weight.float() / scale_OG[:, group_D].float() + zero_OG[:, group_D]).round().clamp(0, top)
        return Codes(own["bits"], code_OD.long(), scale_OG, zero_OG, group_D)


def packed(numbers: Tensor, bits: int, axis: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Packs numbers along an axis, the first in the lowest bits unless `order` says otherwise."""
    rows = numbers.T.tolist() if axis == 0 else numbers.tolist()
    count = 32 // bits
    found = []
    for row in rows:
        row = row + [0] * (-len(row) % count)
        words = []
        for first in range(0, len(row), count):
            word = sum(row[first + (order or range(count))[i]] << (bits * i) for i in range(count))
            words.append(word - 2**32 if word >= 2**31 else word)
        found.append(words)
    tensor = torch.tensor(found, dtype=torch.int32)
    return tensor.T.contiguous() if axis == 0 else tensor


def gptq_entries(codes: Codes, is_v1: bool) -> dict[str, Tensor]:
    qzeros = packed(codes.zero_OG.T, codes.bits, 1)
    ones = sum(1 << shift for shift in range(0, 32, codes.bits))
    return {
        "qweight": packed(codes.code_OD.T, codes.bits, 0),
        "qzeros": qzeros - ones if is_v1 else qzeros,
        "scales": codes.scale_OG.T,
        "g_idx": codes.group_D.int(),
    }


def awq_entries(codes: Codes) -> dict[str, Tensor]:
    order = (0, 2, 4, 6, 1, 3, 5, 7) if codes.bits == 4 else None
    return {
        "qweight": packed(codes.code_OD.T, codes.bits, 1, order),
        "qzeros": packed(codes.zero_OG.T, codes.bits, 1, order),
        "scales": codes.scale_OG.T,
    }


def compressed_entries(codes: Codes, symmetric: bool, ordered: bool) -> dict[str, Tensor]:
    entries = {
        "weight_packed": packed(codes.code_OD, codes.bits, 1),
        "weight_scale": codes.scale_OG,
        "weight_shape": torch.tensor(codes.code_OD.shape),
    }
    if not symmetric:
        entries["weight_zero_point"] = packed(codes.zero_OG, codes.bits, 0)
    return entries | ({"weight_g_idx": codes.group_D.int()} if ordered else {})


def gptq(is_v1: bool = True, config: dict[str, Any] | None = None, **options: Any) -> Case:
    case = Case(lambda codes: gptq_entries(codes, is_v1), {}, **options)
    case.config = {
        "quant_method": "gptq",
        "bits": case.bits,
        "group_size": case.group,
        "sym": case.symmetric,
        "desc_act": case.ordered,
        "checkpoint_format": "gptq" if is_v1 else "gptq_v2",
    } | (config or {})
    return case


def awq(config: dict[str, Any] | None = None, **options: Any) -> Case:
    case = Case(awq_entries, {}, **options)
    case.config = {
        "quant_method": "awq",
        "bits": case.bits,
        "group_size": case.group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": [case.plain],
    } | (config or {})
    return case


def auto_round(packing: str = "auto_round:auto_gptq", extra: dict[str, Any] | None = None, **options: Any) -> Case:
    def entries(codes: Codes) -> dict[str, Tensor]:
        if packing == "auto_round:auto_awq":
            return awq_entries(codes)
        own = gptq_entries(codes, packing == "auto_round:auto_gptq")
        del own["g_idx"]
        return own

    case = Case(entries, {}, **options)
    case.config = {
        "quant_method": "auto-round",
        "packing_format": packing,
        "bits": case.bits,
        "group_size": case.group,
        "sym": case.symmetric,
        "data_type": "int",
        "block_name_to_quantize": "model.layers",
    } | ({} if extra is None else {"extra_config": extra})
    return case


def compressed(**options: Any) -> Case:
    case = Case(lambda codes: compressed_entries(codes, case.symmetric, case.ordered), {}, **options)

    def group(targets: list[str], bits: int, size: int) -> dict[str, Any]:
        weights = {
            "num_bits": bits,
            "type": "int",
            "symmetric": case.symmetric,
            "strategy": "channel" if size == -1 else "group",
            "group_size": None if size == -1 else size,
            "dynamic": False,
            "actorder": "group" if case.ordered else None,
        }
        return {"targets": targets, "weights": weights, "input_activations": None, "output_activations": None}

    groups = {"group_0": group(["Linear"], case.bits, case.group)}
    for index, (pattern, changes) in enumerate(case.other.items()):
        own = {"bits": case.bits, "group": case.group} | changes
        groups[f"group_{1 + index}"] = group([f"re:.*{pattern}.*"], own["bits"], own["group"])
    case.config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ["lm_head", f"re:.*{case.plain}.*"],
    }
    return case


def written(model: Path, folder: Path, case: Case) -> tuple[Path, Path]:
    """Writes the checkpoint, and beside it the plain one with its values. Returns both."""
    values = folder.with_name(f"{folder.name}-values")
    shutil.copytree(model, folder)
    shutil.copytree(model, values)
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if not is_linear(name) or re.search(case.plain, name):
            tensors[name] = plain[name] = weight
            continue
        codes = case.codes(name, weight)
        plain[name] = codes.values.to(weight.dtype)
        tensors |= {name.removesuffix("weight") + leaf: own for leaf, own in case.entries(codes).items()}
    save(folder, tensors)
    save(values, plain)
    set_config(folder, quantization_config=case.config)
    return folder, values


def save(folder: Path, tensors: dict[str, Tensor]) -> None:
    own = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(own, folder / "model.safetensors", metadata={"format": "pt"})


def set_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
