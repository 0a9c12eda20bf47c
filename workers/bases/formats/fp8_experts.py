"""Reads FP8 experts of which transformers 5 stored tensors for all experts of a layer.

`gate_up_proj` [E, 2I, D] has the rows of all gates and then those of all ups. `gate_up_proj_scale_inv` [E, R, C] has a
scale for each block. `down_proj` [E, D, I] is stored in the same way. The modules of transformers have these tensors,
and it saves them if it had read stacked experts, or with save_original_format=False. Otherwise it saves the codes that
it quantized one by one, and the scales stacked.

Blocks run through the rows of gate and up as one matrix, and may hold rows of both. If the experts were quantized one
by one, each of the two begins with a block of its own. The number of scales tells which it is, since transformers
quantizes only matrices that blocks divide.
"""

# E experts · I intermediate size · D in or out · R rows of blocks · C columns of blocks

from __future__ import annotations

import math
from dataclasses import dataclass
from types import EllipsisType

import torch
from torch import Tensor

from lorafleet.kernels.quant.fp8 import FP8
from lorafleet.kernels.quant.scaled_matrix import ScaledMatrix
from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.bases.formats.checkpoint_format import LinearTensors
from lorafleet.workers.bases.formats.float_codes import Block, Codes, matrix_shape, scaled_codes
from lorafleet.workers.bases.formats.stacked_experts import LEAVES, place_of
from lorafleet.workers.bases.stored_tensors import Stored, TensorInMemory


def stacked_matrix(linear: LinearTensors, block: Block) -> ScaledMatrix:
    """Returns the weight of an expert's linear. Raises ConfigError if the tensors are damaged or do not match."""
    module, expert, projection, index = place_of(linear.module)
    experts = LinearTensors(module, linear.names, linear.open)
    codes = Codes(linear.path("weight"), linear.stored("weight"), FP8) if "weight" in linear else _codes(linear)
    scale_path, scale = experts.path(f"{projection}_proj_scale_inv"), experts.stored(f"{projection}_proj_scale_inv")
    scale_shape, (size, _) = scale.get_shape(), matrix_shape(codes.path, codes.stored)
    if len(scale_shape) != 3 or expert >= scale_shape[0]:
        raise ConfigError(
            f"{scale_path} has shape {scale_shape}, which must be [experts, rows and columns of blocks] with more than "
            f"{expert} experts. Export the checkpoint again.",
            "model",
        )
    count = len(LEAVES[projection])
    height = block[0] or count * size
    own, whole = -(-size // (block[0] or size)), -(-count * size // height)
    if scale_shape[1] == count * own:
        return scaled_codes(codes, block, scale_path, _ExpertRows(scale, expert, slice(index * own, (index + 1) * own)))
    if scale_shape[1] != whole:
        raise ConfigError(
            f"{scale_path} has shape {scale_shape}, but one scale for each {height} rows of {count * size} requires "
            f"{whole}. Correct config.json, or export the checkpoint again.",
            "model",
        )
    # Smaller blocks, which begin where the linear does.
    part = math.gcd(index * size, height)
    start_R = torch.arange(index * size, (index + 1) * size, part)
    rows = _ExpertRows(scale, expert, slice(0, whole))[...]
    scales = TensorInMemory(rows[start_R.to(rows.device) // height])
    return scaled_codes(codes, (part, block[1]), scale_path, scales)


def _codes(linear: LinearTensors) -> Codes:
    """Returns a linear's codes out of the tensor of all experts."""
    module, expert, projection, index = place_of(linear.module)
    experts, name = LinearTensors(module, linear.names, linear.open), f"{projection}_proj"
    stored, count = experts.stored(name), len(LEAVES[projection])
    shape = stored.get_shape()
    if len(shape) != 3 or shape[1] % count:
        raise ConfigError(
            f"{experts.path(name)} has shape {shape}, which must be [experts, outputs, inputs] with outputs a multiple "
            f"of {count}. Export the checkpoint again.",
            "model",
        )
    size = shape[1] // count
    return Codes(experts.path(name), _ExpertRows(stored, expert, slice(index * size, (index + 1) * size)), FP8)


@dataclass(frozen=True, slots=True)
class _ExpertRows:
    """Rows of one expert in a tensor of all experts, as a matrix."""

    stored: Stored  # [experts, rows, columns]
    expert: int
    own: slice

    def get_shape(self) -> list[int]:
        return [self.own.stop - self.own.start, self.stored.get_shape()[2]]

    def __getitem__(self, place: tuple[slice, ...] | EllipsisType) -> Tensor:
        rows, columns = (slice(None), slice(None)) if place is ... else place
        first, stop, _ = rows.indices(self.own.stop - self.own.start)
        taken = slice(self.own.start + first, self.own.start + stop)
        return self.stored[slice(self.expert, self.expert + 1), taken, columns][0]
