"""Reads linears that NVIDIA ModelOpt quantized to FP8, MXFP8, NVFP4 or MXFP4, or some to one and some to another.

Its settings are in config.json's quantization_config, or, in older checkpoints, in hf_quant_config.json alone.
Scales for x are not needed: the weights' values are served, and x is rounded at most by token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from lorafleet.kernels.quant.base_weight import QuantizedMatrix, Scheme
from lorafleet.kernels.quant.e2m1 import MX_GROUP, NV_GROUP
from lorafleet.kernels.quant.e2m1_scheme import MXFP4, NVFP4
from lorafleet.kernels.quant.fp8 import FP8
from lorafleet.kernels.quant.scaled_weight import ScaledScheme
from lorafleet.protocol.config_json import read_json
from lorafleet.protocol.errors import ConfigError, UnsupportedModel
from lorafleet.workers.bases.formats.checkpoint_format import REMEDY, LinearTensors, StoredLinears
from lorafleet.workers.bases.formats.float_codes import (
    BY_ROW,
    BY_TENSOR,
    Block,
    mxfp4_matrix,
    nvfp4_matrix,
    scaled_matrix,
)
from lorafleet.workers.bases.formats.fp8_format import refuse_excluded
from lorafleet.workers.bases.text_part import spellings


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The numbers of a quant_algo."""

    scheme: Scheme
    block: Block | None  # None for four bits
    group_size: int | None  # number of columns that share a scale, if config.json may say it

    def matrix(self, linear: LinearTensors) -> QuantizedMatrix:
        if self.scheme == MXFP4:
            return mxfp4_matrix(linear, "weight", "weight_scale")
        if self.block is None:
            return nvfp4_matrix(linear, "weight", "weight_scale", "weight_scale_2", second_divides=False)
        return scaled_matrix(linear, FP8, self.block, "weight_scale")


def _fp8(block: Block, rounds_x: bool) -> _Numbers:
    return _Numbers(ScaledScheme(block=block[1], rounds_x=rounds_x), block, block[1])


# By quant_algo, which some versions write in lower case. Those of weights only do not round x.
ALGORITHMS = {
    "FP8": _fp8(BY_TENSOR, True),
    "FP8_PER_CHANNEL_PER_TOKEN": _fp8(BY_ROW, True),
    "FP8_PB_WO": _fp8((128, 128), False),
    "MXFP8": _fp8((1, MX_GROUP), True),
    "NVFP4": _Numbers(NVFP4, None, NV_GROUP),
    "W4A16_NVFP4": _Numbers(NVFP4, None, NV_GROUP),
    "MXFP4": _Numbers(MXFP4, None, MX_GROUP),
}
MIXED = "MIXED_PRECISION"  # `quantized_layers` has the settings of each linear


class ModelOptFormat:
    tensors = re.compile(r"weight|weight_scale|weight_scale_2|input_scale")
    other_tensors: frozenset[str] = frozenset()

    def __init__(self, config: Mapping[str, Any], linears: StoredLinears) -> None:
        settings = _settings(config)
        _check_kv_cache(settings)
        is_mixed = _algorithm(settings) == MIXED
        numbers = None if is_mixed else _numbers(settings, "")
        by_layer = settings.get("quantized_layers") or {}
        excluded = [*(settings.get("exclude_modules") or []), *(settings.get("ignore") or [])]
        self._numbers: dict[str, _Numbers] = {}
        for module, name in linears.file_names(linears.with_tensor(re.compile("weight_scale")), "weight_scale"):
            refuse_excluded(name, (one for one in excluded if any(fnmatchcase(n, one) for n in spellings(name))))
            self._numbers[module] = numbers or _numbers(_settings_of(name, by_layer), f" for {name}")
        self.schemes: dict[str, Scheme] = {module: own.scheme for module, own in self._numbers.items()}

    def matrix(self, linear: LinearTensors) -> QuantizedMatrix:
        return self._numbers[linear.module].matrix(linear)


def modelopt_settings(folder: Path) -> dict[str, Any] | None:
    """Returns the settings of hf_quant_config.json in the form of a quantization_config, or None without that file."""
    path = folder / "hf_quant_config.json"
    return {**read_json(path), "quant_method": "modelopt"} if path.exists() else None


def quantizes_only_kv_cache(config: Mapping[str, Any]) -> bool:
    """Returns whether ModelOpt left the weights alone and wrote only a scale per layer for K and for V.

    Raises UnsupportedModel if the KV cache is not FP8.
    """
    settings = _settings(config)
    if config.get("quant_method") != "modelopt" or settings.get("quant_algo"):
        return False
    _check_kv_cache(settings)
    return bool(settings.get("kv_cache_quant_algo") or settings.get("kv_cache_scheme"))


def _settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("quantization") or config


def _algorithm(settings: Mapping[str, Any]) -> str:
    return str(settings.get("quant_algo")).upper()


def _numbers(settings: Mapping[str, Any], where: str) -> _Numbers:
    """Returns the numbers of a checkpoint or of one linear. `where` names the linear in errors."""
    algorithm = _algorithm(settings)
    if algorithm not in ALGORITHMS:
        raise UnsupportedModel(
            f"quantization_config: ModelOpt's quant_algo={algorithm!r}{where} is not supported; "
            f"{', '.join((*ALGORITHMS, MIXED))} are. {REMEDY}"
        )
    numbers = ALGORITHMS[algorithm]
    if (settings.get("group_size") or numbers.group_size) != numbers.group_size:
        raise UnsupportedModel(
            f"quantization_config: group_size={settings['group_size']!r}{where} is not supported with {algorithm}, "
            f"which has groups of {numbers.group_size}. {REMEDY}"
        )
    return numbers


def _settings_of(name: str, by_layer: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """Returns the settings of a linear, or those of the nearest module above it that has some, such as all experts."""
    for spelled in spellings(name):
        parts = spelled.split(".")
        for end in range(len(parts), 0, -1):
            found = by_layer.get(".".join(parts[:end]))
            if found is not None:
                return found
    raise ConfigError(
        f"{name} is stored quantized, but quantization_config's quantized_layers does not name it. Correct the "
        "configuration, or export the checkpoint again.",
        "model",
    )


def _check_kv_cache(settings: Mapping[str, Any]) -> None:
    scheme = settings.get("kv_cache_scheme") or {}
    algorithm = settings.get("kv_cache_quant_algo") or (scheme if isinstance(scheme, str) else None)
    is_fp8 = isinstance(scheme, str) or not scheme or (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)
    if (algorithm is not None and str(algorithm).upper() != "FP8") or not is_fp8:
        raise UnsupportedModel(
            f"quantization_config: a KV cache of {algorithm or dict(scheme)} is not supported; FP8 is. {REMEDY}"
        )
