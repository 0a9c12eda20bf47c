"""Reads a linear's quantized weight from a checkpoint: bitsandbytes' 4 bits, or e4m3 with a scale per output channel.

bitsandbytes stores these tensors:
- W's codes are one column of bytes, with the first of two codes in the upper bits.
- The blocks' magnitudes may themselves be 8-bit codes of another codebook, with their own magnitudes and an offset.
- Everything else is JSON in a tensor of bytes.
"""

# B blocks · N bytes

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container
from typing import Literal

import msgspec
import torch
from torch import Tensor

from lorafleet.kernels.quant.base_weight import QuantizedMatrix
from lorafleet.kernels.quant.fp8 import FP8
from lorafleet.kernels.quant.fp8_weight import FP8Matrix, quantize_rows
from lorafleet.kernels.quant.nf4 import BLOCK, NF4Matrix, quantize
from lorafleet.protocol.errors import ConfigError
from lorafleet.protocol.quantization_methods import Method

_STATE = r"quant_state\.bitsandbytes__(?:nf4|fp4)"
MARK = re.compile(rf"(.*)\.weight(?:\.{_STATE}|_scale)")  # what every quantized linear has beside its weight
BESIDE_WEIGHT = re.compile(rf".*\.weight(?:\.(?:absmax|quant_map|nested_absmax|nested_quant_map|{_STATE})|_scale)")
Quantize = Callable[[Tensor], QuantizedMatrix]
QUANTIZE: dict[Method, Quantize] = {"nf4": quantize, "fp8": quantize_rows}
DTypeName = Literal["float32", "bfloat16", "float16"]


class _State(msgspec.Struct, frozen=True):
    """The QuantState of bitsandbytes, without its tensors."""

    quant_type: Literal["nf4", "fp4"]
    blocksize: int
    dtype: DTypeName
    shape: tuple[int, int]
    nested_blocksize: int | None = None
    nested_offset: float = 0.0


def quantized_matrix(name: str, names: Container[str], read: Callable[[str], Tensor]) -> NF4Matrix | FP8Matrix | None:
    """Returns the quantized weight, or None if it is not quantized. Raises ConfigError if its tensors are damaged.

    Args:
        name: the name of the weight.
        names: the names of all tensors.
        read: returns the named tensor, on the device that is to decode it.
    """
    for kind in ("nf4", "fp4"):
        if (state := f"{name}.quant_state.bitsandbytes__{kind}") in names:
            return _four_bits(name, read(state), names, read)
    if f"{name}_scale" in names:
        return _e4m3(name, read)
    return None


def _four_bits(name: str, packed_state: Tensor, names: Container[str], read: Callable[[str], Tensor]) -> NF4Matrix:
    try:
        state = msgspec.convert(json.loads(bytes(packed_state.tolist())), _State)
    except (ValueError, TypeError) as error:  # msgspec's errors are ValueErrors too
        raise ConfigError(f"{name}: its bitsandbytes state cannot be read: {error}", "model") from None
    if state.blocksize % BLOCK:
        raise ConfigError(
            f"{name} is quantized in blocks of {state.blocksize}; only multiples of {BLOCK} are supported. "
            "Quantize it again.",
            "model",
        )
    outputs, inputs = state.shape
    packed_N = read(name).contiguous().flatten().view(torch.uint8)
    absmax_B, book = _absmax(name, state, names, read), read(f"{name}.quant_map").float()
    blocks = -(-outputs * inputs // state.blocksize)
    if outputs * inputs != 2 * len(packed_N) or absmax_B.shape != (blocks,) or book.shape != (16,):
        raise ConfigError(
            f"{name}: {len(packed_N)} bytes, {absmax_B.numel()} absmax values and a codebook of {book.numel()} entries "
            f"do not match a weight of {outputs} x {inputs} values in blocks of {state.blocksize}.",
            "model",
        )
    code_OD = torch.stack([packed_N >> 4, packed_N & 15], dim=1).view(outputs, inputs)
    return NF4Matrix(code_OD, absmax_B, book, getattr(torch, state.dtype), state.blocksize)


def _absmax(name: str, state: _State, names: Container[str], read: Callable[[str], Tensor]) -> Tensor:
    absmax_B = read(f"{name}.absmax")
    if f"{name}.nested_absmax" not in names:
        return absmax_B.float()
    book, outer = read(f"{name}.nested_quant_map").float(), read(f"{name}.nested_absmax").float()
    size = state.nested_blocksize or 0
    if absmax_B.dtype != torch.uint8 or book.shape != (256,) or size < 1 or len(outer) != -(-len(absmax_B) // size):
        raise ConfigError(f"{name}: its nested quantization is damaged.", "model")
    return book[absmax_B.int()] * outer.repeat_interleave(size)[: len(absmax_B)] + state.nested_offset


def _e4m3(name: str, read: Callable[[str], Tensor]) -> FP8Matrix:
    weight_OD, scale = read(name), read(f"{name}_scale").float()
    if weight_OD.dtype != FP8 or weight_OD.ndim != 2 or scale.numel() != len(weight_OD):
        raise ConfigError(
            f"{name} is {weight_OD.dtype} {list(weight_OD.shape)} with {scale.numel()} scales; only e4m3 with one "
            "scale per output channel is supported.",
            "model",
        )
    return FP8Matrix(weight_OD, scale.flatten())
