"""Reads linears that NVIDIA ModelOpt quantized to FP8, MXFP8, NVFP4 or MXFP4.

Its settings are in config.json's quantization_config, or, in older checkpoints, in hf_quant_config.json alone.
Scales for x are not needed: the weights' values are served, and x is rounded at most by token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from lorafleet.kernels.quant.base_weight import QuantizedMatrix, Scheme
from lorafleet.kernels.quant.e2m1 import MX_GROUP, NV_GROUP
from lorafleet.kernels.quant.e2m1_scheme import MXFP4, NVFP4
from lorafleet.kernels.quant.fp8 import FP8
from lorafleet.kernels.quant.scaled_weight import ScaledScheme
from lorafleet.protocol.config_json import read_json
from lorafleet.protocol.errors import UnsupportedModel
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

# By quant_algo, which some versions write in lower case. Those of weights only do not round x.
FP8_ALGORITHMS: dict[str, tuple[Block, bool]] = {
    "FP8": (BY_TENSOR, True),
    "FP8_PER_CHANNEL_PER_TOKEN": (BY_ROW, True),
    "FP8_PB_WO": ((128, 128), False),
    "MXFP8": ((1, MX_GROUP), True),
}
# By quant_algo, with the number of columns that share a scale.
FOUR_BITS: dict[str, tuple[Scheme, int]] = {
    "NVFP4": (NVFP4, NV_GROUP),
    "W4A16_NVFP4": (NVFP4, NV_GROUP),
    "MXFP4": (MXFP4, MX_GROUP),
}


class ModelOptFormat:
    tensors = re.compile(r"weight|weight_scale|weight_scale_2|input_scale")
    stacked: frozenset[str] = frozenset()

    def __init__(self, config: Mapping[str, Any], linears: StoredLinears) -> None:
        settings: Mapping[str, Any] = config.get("quantization") or config
        algorithm = str(settings.get("quant_algo")).upper()
        if algorithm not in FP8_ALGORITHMS and algorithm not in FOUR_BITS:
            served = ", ".join((*FP8_ALGORITHMS, *FOUR_BITS))
            raise UnsupportedModel(
                f"quantization_config: ModelOpt's quant_algo={algorithm!r} is not supported; {served} are. {REMEDY}"
            )
        _check_kv_cache(settings)
        self._block: Block | None = None  # None for four bits
        if algorithm in FP8_ALGORITHMS:
            self._block, rounds_x = FP8_ALGORITHMS[algorithm]
            self._scheme: Scheme = ScaledScheme(block=self._block[1], rounds_x=rounds_x)
            size = self._block[1]
        else:
            self._scheme, size = FOUR_BITS[algorithm]
        if (settings.get("group_size") or size) != size:
            raise UnsupportedModel(
                f"quantization_config: group_size={settings['group_size']!r} is not supported with {algorithm}, which "
                f"has groups of {size}. {REMEDY}"
            )
        excluded = [*(settings.get("exclude_modules") or []), *(settings.get("ignore") or [])]
        self.schemes: dict[str, Scheme] = {}
        for module, name in linears.file_names(linears.with_tensor(re.compile("weight_scale")), "weight_scale"):
            refuse_excluded(name, (one for one in excluded if any(fnmatchcase(n, one) for n in spellings(name))))
            self.schemes[module] = self._scheme

    def matrix(self, linear: LinearTensors) -> QuantizedMatrix:
        if self._scheme == MXFP4:
            return mxfp4_matrix(linear, "weight", "weight_scale")
        if self._block is None:
            return nvfp4_matrix(linear, "weight", "weight_scale", "weight_scale_2", second_divides=False)
        return scaled_matrix(linear, FP8, self._block, "weight_scale")


def modelopt_settings(folder: Path) -> dict[str, Any] | None:
    """Returns the settings of hf_quant_config.json in the form of a quantization_config, or None without that file."""
    path = folder / "hf_quant_config.json"
    return {**read_json(path), "quant_method": "modelopt"} if path.exists() else None


def _check_kv_cache(settings: Mapping[str, Any]) -> None:
    algorithm, scheme = settings.get("kv_cache_quant_algo"), settings.get("kv_cache_scheme") or {}
    is_fp8 = not scheme or (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)
    if algorithm not in (None, "FP8") or not is_fp8:
        raise UnsupportedModel(
            f"quantization_config: a KV cache of {algorithm or dict(scheme)} is not supported; FP8 is. {REMEDY}"
        )
