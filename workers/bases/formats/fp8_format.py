"""Reads linears of e4m3 that checkpoints with quant_method fp8 or fbgemm_fp8 have.

DeepSeek's and Qwen's have a scale for each block of 128 x 128 numbers, FBGEMM's (Llama 3.1 405B) one for each row, and
others one for each tensor.

The scales multiply the codes, and are called weight_scale_inv, weight_scale or, in Gemma 4 as transformers 5 saves it,
scale. A static activation_scheme stores a scale for x as well, and FBGEMM a bound on it. They are not needed: the
weights' values are served, and x is rounded at most by token. Experts are stored one by one, or as fp8_experts.py says.
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
from lorafleet.workers.bases.formats.fp8_experts import stacked_matrix
from lorafleet.workers.bases.formats.stacked_experts import LEAVES, expert_linears
from lorafleet.workers.bases.stored_tensors import Stored
from lorafleet.workers.bases.text_part import spellings

SCALES = "weight_scale_inv", "weight_scale", "scale"
STACKED = re.compile(r"model\.(.+\.experts)\.(gate_up|down)_proj_(scale_inv|activation_scale)")


class FP8Format:
    tensors = re.compile(r"weight|(?:weight_)?scale|weight_scale_inv|input_scale(?:_ub)?|activation_scale")

    def __init__(self, config: Mapping[str, Any], linears: StoredLinears) -> None:
        for name, served in (("fmt", (None, "e4m3")), ("activation_scheme", (None, "dynamic", "static"))):
            if config.get(name) not in served:
                raise UnsupportedModel(f"quantization_config: {name}={config[name]!r} is not supported. {REMEDY}")
        is_fbgemm = config.get("quant_method") == "fbgemm_fp8"
        self._block = BY_ROW if is_fbgemm else _block(config.get("weight_block_size"))
        self._excluded = [
            *(config.get("modules_to_not_convert") or []),
            *(config.get("ignored_layers") or []),
        ]
        single, left_plain = self._single_linears(linears)
        stacked, tensors = self._stacked_linears(linears)
        self._stacked = frozenset(stacked)
        twice = next((module for module in single if module in self._stacked), None)
        if twice is not None:
            raise _stored_twice(twice)
        self.other_tensors = frozenset(left_plain + tensors)
        self.schemes: dict[str, Scheme] = dict.fromkeys(single + stacked, ScaledScheme(block=self._block[1]))

    def matrix(self, linear: LinearTensors) -> QuantizedMatrix:
        if linear.module in self._stacked:
            return stacked_matrix(linear, self._block)
        return scaled_matrix(linear, FP8, self._block, next(leaf for leaf in SCALES if leaf in linear))

    def _single_linears(self, linears: StoredLinears) -> tuple[list[str], list[str]]:
        """Returns the quantized linears that have tensors of their own, and the names of scales without a meaning."""
        found: list[str] = []
        left_plain: list[str] = []
        for leaf in SCALES:
            for module, name in linears.file_names(linears.with_tensor(re.compile(leaf)), leaf):
                linear = linears.linear(module)
                if leaf == "scale" and "weight" not in linear:  # a vector beside a router
                    continue
                if _is_left_plain(linear.stored("weight"), self._block):
                    left_plain.append(linear.path(leaf))
                    continue
                self._refuse_excluded(name)
                found.append(module)
        return found, left_plain

    def _stacked_linears(self, linears: StoredLinears) -> tuple[list[str], list[str]]:
        """Returns the linears in tensors of all experts of a layer, and the names of these tensors."""
        found: list[str] = []
        tensors: list[str] = []
        for match in linears.matching(STACKED):
            tensors.append(match[0])
            if match[3] != "scale_inv":
                continue
            experts, name = linears.linear(match[1]), f"{match[2]}_proj"
            modules = expert_linears(linears, match[0], match[1], match[2], 3)
            single = [module for module in modules if "weight" in linears.linear(module)]
            if single and name in experts:
                raise _stored_twice(single[0])
            code = linears.linear(single[0]).stored("weight") if single else experts.stored(name)
            if _is_left_plain(code, self._block, len(LEAVES[match[2]]) if single else 1):
                continue
            for _, file_name in linears.file_names([match[1]], f"{name}_scale_inv"):
                self._refuse_excluded(file_name)
            tensors += [] if single else [experts.path(name)]
            found += modules if single else expert_linears(linears, experts.path(name), match[1], match[2], 3)
        return found, tensors

    def _refuse_excluded(self, name: str) -> None:
        named = spellings(name)
        refuse_excluded(name, (one for one in self._excluded if any(f".{one}." in f".{n}." for n in named)))


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


def _is_left_plain(stored: Stored, block: Block, of_rows: int = 1) -> bool:
    """Returns whether transformers did not quantize the matrix, since blocks do not divide it.

    It stores a scale all the same, which nothing has set. A linear with plain numbers does not use its scale.

    Args:
        of_rows: How many times as many rows the matrix had that was to be quantized.
    """
    shape = stored.get_shape()
    if len(shape) < 2:
        return False
    sizes = shape[-2] * of_rows, shape[-1]
    if all(of_block is None or size % of_block == 0 for size, of_block in zip(sizes, block, strict=True)):
        return False
    dtype = stored[(slice(0, 1),) * len(shape)].dtype
    return dtype.is_floating_point and dtype.itemsize > 1


def _stored_twice(module: str) -> ConfigError:
    return ConfigError(
        f"model.{module} is stored alone and with all experts of its layer. Export the checkpoint again.", "model"
    )
