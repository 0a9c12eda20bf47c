"""Reads mlx-lm's adapters and converts them to PEFT's layout.

They have adapters.safetensors, with lora_a and lora_b transposed, and a config of their own. Their layers compute
y + scale * (x @ lora_a) @ lora_b, so A is lora_a^T, B is lora_b^T and the scaling is `scale`. The first versions
multiplied that by alpha / rank. DoRA's magnitudes are `m`.
Source: mlx-lm, mlx_lm/tuner/lora.py and dora.py.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from torch import Tensor

from lorafleet.protocol.adapter_formats.adapter_files import CONFIG_NAME, MAX_WEIGHTS_BYTES, AdapterFolder
from lorafleet.protocol.errors import AdapterMalformed, AdapterUnsupported
from lorafleet.protocol.strict_json import shown
from lorafleet.tools.peft_files import PEFTFiles, load_tensors
from lorafleet.workers.adapters.weight_files import SafetensorsFile

MLX_WEIGHTS_NAME = "adapters.safetensors"
_TENSOR = re.compile(r"(?:language_model\.)?(?:model\.)?(?P<module>layers\.\d+\.[\w.]+|lm_head)\.(?P<leaf>lora_[ab]|m)")
_LEAVES = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector"}


def is_mlx(folder: AdapterFolder, config: Mapping[str, object]) -> bool:
    return folder.has(MLX_WEIGHTS_NAME) and "peft_type" not in config


def read_mlx(folder: AdapterFolder, config: Mapping[str, object]) -> PEFTFiles:
    """Reads the adapter in a folder. Raises AdapterUnsupported for whole weights (fine_tune_type "full"), embeddings
    and experts."""
    kind = config.get("fine_tune_type", "lora")
    if kind not in ("lora", "dora"):
        raise AdapterUnsupported(f"mlx-lm's fine_tune_type {shown(kind)} is not supported; lora and dora are.")
    with folder.open(MLX_WEIGHTS_NAME, MAX_WEIGHTS_BYTES) as file:
        stored = load_tensors(SafetensorsFile(file, hashlib.sha256()), file.name)
    tensors, ranks = {}, {}
    for name, tensor in stored.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise AdapterUnsupported(f"mlx-lm's tensor {shown(name)} is not a lora_a, lora_b or m of a linear layer.")
        module = _full_name(match["module"])
        tensors[f"base_model.model.{module}.{_LEAVES[match['leaf']]}"] = _transposed(tensor, match["leaf"], name)
        if match["leaf"] == "lora_a":
            ranks[module] = tensor.shape[1]
    return PEFTFiles(_peft_config(config, ranks, use_dora=kind == "dora"), tensors, ["mlx-lm's layout -> PEFT's"])


def _full_name(module: str) -> str:
    return module if module == "lm_head" else f"model.{module}"


def _transposed(tensor: Tensor, leaf: str, name: str) -> Tensor:
    wanted = 1 if leaf == "m" else 2
    if tensor.dim() != wanted:
        raise AdapterUnsupported(
            f"mlx-lm's tensor {shown(name)} has shape {list(tensor.shape)}; only linear layers are converted."
        )
    return tensor if leaf == "m" else tensor.T.contiguous()


def _peft_config(config: Mapping[str, object], ranks: Mapping[str, int], *, use_dora: bool) -> dict[str, object]:
    if not ranks:
        raise AdapterMalformed(f"{MLX_WEIGHTS_NAME} has no lora_a.")
    common = max(ranks.values())
    scale = _scale(config)
    other = {module: rank for module, rank in ranks.items() if rank != common}
    base = config.get("model")
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base if isinstance(base, str) else None,
        "inference_mode": True,
        "r": common,
        "lora_alpha": scale * common,
        "rank_pattern": other,
        "alpha_pattern": {module: scale * rank for module, rank in other.items()},
        "lora_dropout": 0.0,
        "bias": "none",
        "use_dora": use_dora,
        "target_modules": sorted(ranks),
    }


def _scale(config: Mapping[str, object]) -> float:
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise AdapterMalformed(f"{CONFIG_NAME} has no lora_parameters, where mlx-lm stores the scale.")
    scale = _number(parameters, "scale")
    if "alpha" in parameters:
        scale *= _number(parameters, "alpha") / _number(parameters, "rank")
    return scale


def _number(parameters: Mapping[str, object], name: str) -> float:
    value = parameters.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < abs(value) < 1e30:
        raise AdapterMalformed(f"lora_parameters.{name} is {shown(value)}; it must be a finite number other than 0.")
    return float(value)
