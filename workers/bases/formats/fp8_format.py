"""Reads linears of e4m3 that checkpoints with quant_method fp8 or fbgemm_fp8 have.

DeepSeek's and Qwen's have a scale for each block of 128 x 128 numbers, FBGEMM's (Llama 3.1 405B) one for each row, and
others one for each tensor.

The scales multiply the codes, and are called weight_scale_inv or weight_scale. A static activation_scheme stores a
scale for x as well, and FBGEMM a bound on it. They are not needed: the weights' values are served, and x is rounded at
most by token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from lorafleet.kernels.quant.base_weight import QuantizedMatrix, Scheme
from lorafleet.kernels.quant.fp8 import FP8
from lorafleet.kernels.quant.scaled_weight import ScaledScheme
from lorafleet.protocol.errors import ConfigError, UnsupportedModel
from lorafleet.workers.bases.formats.checkpoint_format import REMEDY, LinearTensors, StoredLinears
from lorafleet.workers.bases.formats.float_codes import BY_ROW, BY_TENSOR, Block, scaled_matrix
from lorafleet.workers.bases.text_part import spellings

SCALE = re.compile(r"weight_scale(?:_inv)?")


class FP8Format:
    tensors = re.compile(r"weight|weight_scale(?:_inv)?|input_scale(?:_ub)?|activation_scale")
    stacked: frozenset[str] = frozenset()

    def __init__(self, config: Mapping[str, Any], linears: StoredLinears) -> None:
        for name, served in (("fmt", (None, "e4m3")), ("activation_scheme", (None, "dynamic", "static"))):
            if config.get(name) not in served:
                raise UnsupportedModel(f"quantization_config: {name}={config[name]!r} is not supported. {REMEDY}")
        is_fbgemm = config.get("quant_method") == "fbgemm_fp8"
        self._block = BY_ROW if is_fbgemm else _block(config.get("weight_block_size"))
        excluded = [
            *(config.get("modules_to_not_convert") or []),
            *(config.get("ignored_layers") or []),
        ]
        self.schemes: dict[str, Scheme] = {}
        for leaf in ("weight_scale_inv", "weight_scale"):
            for module, name in linears.file_names(linears.with_tensor(re.compile(leaf)), leaf):
                refuse_excluded(name, (one for one in excluded if any(f".{one}." in f".{n}." for n in spellings(name))))
                self.schemes[module] = ScaledScheme(block=self._block[1])

    def matrix(self, linear: LinearTensors) -> QuantizedMatrix:
        leaf = "weight_scale_inv" if "weight_scale_inv" in linear else "weight_scale"
        return scaled_matrix(linear, FP8, self._block, leaf)


def refuse_excluded(name: str, matches: Iterable[str]) -> None:
    """Raises ConfigError if a linear that is stored quantized matches a name of those that are not."""
    for match in matches:
        raise ConfigError(
            f"{name} is stored quantized, but quantization_config says by {match!r} that it is not. Correct the "
            "configuration.",
            "model",
        )


def _block(size: object) -> Block:
    if size is None:
        return BY_TENSOR
    if isinstance(size, list) and len(size) == 2 and all(type(n) is int and 0 < n <= 1024 for n in size):
        return size[0], size[1]
    raise UnsupportedModel(
        f"quantization_config: weight_block_size={size!r} is not supported; it must be two numbers from 1 to 1024. "
        f"{REMEDY}"
    )
