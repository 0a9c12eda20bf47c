"""Reads linears that bitsandbytes quantized to four bits, NF4 or FP4, or to int8 (LLM.int8).

In eight bits, `SCB` has the largest magnitude of each row, which the code 127 stands for. x is not rounded, so that
its outliers need no product of their own. bitsandbytes stores these tensors for each linear of four bits:
- W's codes are one column of bytes, with the first of two codes in the upper bits.
- The blocks' magnitudes may themselves be 8-bit codes of another codebook, with their own magnitudes and an offset.
- Everything else is JSON in a tensor of bytes.
"""

# B blocks · N bytes

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from lorafleet.kernels.quant.base_weight import QuantizedMatrix, Scheme
from lorafleet.kernels.quant.nf4 import BLOCK, NF4Matrix, NF4Scheme
from lorafleet.kernels.quant.scaled_matrix import ScaledMatrix
from lorafleet.kernels.quant.scaled_weight import ScaledScheme
from lorafleet.protocol.errors import ConfigError, UnsupportedModel
from lorafleet.workers.bases.formats.checkpoint_format import REMEDY, LinearTensors, StoredLinears
from lorafleet.workers.bases.formats.float_codes import BY_ROW, scaled_matrix
from lorafleet.workers.bases.stored_tensors import Stored, TensorInMemory

_STATE = r"weight\.quant_state\.bitsandbytes__(?:nf4|fp4)"
INT8 = ScaledScheme("int8", torch.int8, rounds_x=False)
LARGEST_CODE = 127
MOST_BLOCK = 4096  # Largest blocksize of bitsandbytes.
BOOK_SIZE = 16
MOST_STATE_BYTES = 1 << 16  # of a linear's JSON, which has some 150
BITS = ("load_in_4bit", "_load_in_4bit", "load_in_8bit", "_load_in_8bit")
DTypeName = Literal["float32", "bfloat16", "float16"]


class _State(msgspec.Struct, frozen=True):
    """The QuantState of bitsandbytes, without its tensors."""

    quant_type: Literal["nf4", "fp4"]
    blocksize: int
    dtype: DTypeName
    shape: tuple[int, int]
    nested_blocksize: int | None = None
    nested_offset: float = 0.0


class BitsandbytesFormat:
    tensors = re.compile(
        rf"SCB|weight_format|weight(?:\.(?:absmax|quant_map|nested_absmax|nested_quant_map))?|{_STATE}"
    )
    other_tensors: frozenset[str] = frozenset()

    def __init__(self, config: Mapping[str, Any], linears: StoredLinears) -> None:
        if not any(config.get(key) for key in BITS):
            raise UnsupportedModel(f"quantization_config: bitsandbytes has none of {', '.join(BITS)}. {REMEDY}")
        self.schemes: dict[str, Scheme] = {}
        for module in linears.with_tensor(re.compile(_STATE)):
            linear = linears.linear(module)
            book = tuple(_book(linear).tolist())
            self.schemes[module] = NF4Scheme(book=book, dtype=getattr(torch, _state(linear).dtype))
        self.schemes |= dict.fromkeys(linears.with_tensor(re.compile("SCB")), INT8)

    def matrix(self, linear: LinearTensors) -> QuantizedMatrix:
        return _eight_bits(linear) if "SCB" in linear else _four_bits(linear)


def _eight_bits(linear: LinearTensors) -> ScaledMatrix:
    if "weight_format" in linear and linear.tensor("weight_format", 1).any():
        raise ConfigError(
            f"{linear.path('weight_format')} is not 0: the codes' order is that of an old GPU. Quantize it again.",
            "model",
        )
    return scaled_matrix(linear, torch.int8, BY_ROW, "SCB", 1 / LARGEST_CODE)


def _state(linear: LinearTensors) -> _State:
    kind = "nf4" if "weight.quant_state.bitsandbytes__nf4" in linear else "fp4"
    name = linear.path("weight")
    packed_state = linear.tensor(f"weight.quant_state.bitsandbytes__{kind}", MOST_STATE_BYTES)
    try:
        state = msgspec.convert(json.loads(bytes(packed_state.flatten().tolist())), _State)
    except (ValueError, TypeError, RecursionError) as error:  # msgspec's errors are ValueErrors too
        raise ConfigError(f"{name}: its bitsandbytes state cannot be read: {error}", "model") from None
    if not BLOCK <= state.blocksize <= MOST_BLOCK or state.blocksize % BLOCK:
        raise ConfigError(
            f"{name} is quantized in blocks of {state.blocksize}; only multiples of {BLOCK} up to {MOST_BLOCK} are "
            "supported. Quantize it again.",
            "model",
        )
    return state


def _book(linear: LinearTensors) -> Tensor:
    """Returns the values that codes stand for, float32 [16]."""
    book = linear.tensor("weight.quant_map", BOOK_SIZE).float()
    if book.shape != (BOOK_SIZE,) or not book.isfinite().all():
        raise ConfigError(
            f"{linear.path('weight')}: its codebook has shape {list(book.shape)} or numbers that are not finite; it "
            f"must have {BOOK_SIZE} numbers. Quantize it again.",
            "model",
        )
    return book


def _four_bits(linear: LinearTensors) -> NF4Matrix:
    name, state, book = linear.path("weight"), _state(linear), _book(linear)
    outputs, inputs = state.shape
    packed = linear.stored("weight")
    packed_shape = packed.get_shape()
    number_bytes = packed[tuple(slice(0, 1) for _ in packed_shape) if packed_shape else ...].element_size()
    num_bytes, blocks = prod(packed_shape) * number_bytes, -(-outputs * inputs // state.blocksize)
    fits = outputs > 0 and inputs > 0 and outputs * inputs == 2 * num_bytes
    absmax_B = _absmax(linear, state, blocks) if fits else None
    if absmax_B is None or absmax_B.shape != (blocks,):
        found = f"{num_bytes} bytes" if absmax_B is None else f"{absmax_B.numel()} absmax values"
        raise ConfigError(
            f"{name}: {found} do not match a weight of {outputs} x {inputs} values in blocks of {state.blocksize}. "
            "Quantize it again.",
            "model",
        )
    if not absmax_B.isfinite().all():
        raise ConfigError(f"{name}: its absmax has NaN or infinite numbers. Quantize it again.", "model")
    if packed_shape[1:] not in ([], [1]):  # Old versions stored a row.
        packed = TensorInMemory(packed[...].flatten())
    codes = _Codes(packed, number_bytes, inputs)
    return NF4Matrix(codes, absmax_B, book, (outputs, inputs), getattr(torch, state.dtype), state.blocksize)


@dataclass(frozen=True, slots=True)
class _Codes:
    """The codes [O, D] of a column of bytes of two each. Only the rows that are indexed are read."""

    packed: Stored  # a column of N numbers of any dtype, which stand for their bytes
    number_bytes: int
    inputs: int  # D, which is even: NF4Scheme refuses other linears

    def __getitem__(self, place: tuple[slice, ...]) -> Tensor:
        rows, columns = place
        first, stop = rows.start * self.inputs // 2, rows.stop * self.inputs // 2
        size = self.number_bytes
        whole = self.packed[(slice(first // size, -(-stop // size)),)].contiguous().flatten().view(torch.uint8)
        packed_N = whole[first % size :][: stop - first]
        return torch.stack([packed_N >> 4, packed_N & 15], dim=1).view(-1, self.inputs)[:, columns]


def _absmax(linear: LinearTensors, state: _State, blocks: int) -> Tensor:
    """Returns the magnitudes as the file has them, which are at most one for each of so many blocks."""
    absmax_B = linear.tensor("weight.absmax", blocks)
    if "weight.nested_absmax" not in linear:
        return absmax_B.float()
    book = linear.tensor("weight.nested_quant_map", 256).float()
    outer = linear.tensor("weight.nested_absmax", blocks).float()
    size = state.nested_blocksize or 0
    if (
        absmax_B.dtype != torch.uint8
        or absmax_B.dim() != 1
        or book.shape != (256,)
        or not 1 <= size <= MOST_BLOCK
        or outer.shape != (-(-len(absmax_B) // size),)
    ):
        raise ConfigError(f"{linear.path('weight')}: its nested quantization is damaged.", "model")
    return book[absmax_B.int()] * outer.repeat_interleave(size)[: len(absmax_B)] + state.nested_offset
