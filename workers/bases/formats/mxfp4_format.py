"""Reads the experts of gpt-oss, which are stored in MXFP4 with quant_method mxfp4. Everything else is plain.

All experts of a layer are in one tensor. `gate_up_proj_blocks` [E, 2I, D / 32, 16] has two codes of e2m1 in a byte, and
`gate_up_proj_scales` [E, 2I, D / 32] an exponent for each 32 numbers. Rows of gate and up alternate. `down_proj` is
stored in the same way.
"""

# E experts · I intermediate size · D in · O out

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from lorafleet.kernels.quant.base_weight import Scheme
from lorafleet.kernels.quant.e2m1 import MX_GROUP, E2M1Matrix, e2m1_book
from lorafleet.kernels.quant.e2m1_scheme import MXFP4
from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.bases.formats.checkpoint_format import LinearTensors, StoredLinears
from lorafleet.workers.bases.formats.float_codes import Codes, exponent_values
from lorafleet.workers.bases.formats.fp8_format import refuse_excluded
from lorafleet.workers.bases.formats.stacked_experts import LEAVES, expert_linears, place_of
from lorafleet.workers.bases.stored_tensors import Stored

STACKED = re.compile(r"model\.(.+\.experts)\.(gate_up|down)_proj_(blocks|scales)")
BLOCK_BYTES = MX_GROUP // 2


class MXFP4Format:
    tensors = re.compile("(?!)")  # no tensor belongs to a single linear

    def __init__(self, config: Mapping[str, Any], linears: StoredLinears) -> None:
        self.schemes: dict[str, Scheme] = {}
        self.other_tensors: frozenset[str] = frozenset(match[0] for match in linears.matching(STACKED))
        excluded = config.get("modules_to_not_convert") or []
        for match in linears.matching(STACKED):
            module = f"model.{match[1]}"
            refuse_excluded(
                module, (one for one in excluded if fnmatchcase(module, one) or fnmatchcase(module, f"{one}.*"))
            )
            if match[3] == "blocks":
                self.schemes |= dict.fromkeys(expert_linears(linears, match[0], match[1], match[2], 4), MXFP4)

    def matrix(self, linear: LinearTensors) -> E2M1Matrix:
        module, expert, name, index = place_of(linear.module)
        count, prefix = len(LEAVES[name]), f"model.{module}.{name}_proj"
        blocks, scales = (_opened(linear, f"{prefix}_{kind}") for kind in ("blocks", "scales"))
        shape = blocks.get_shape()
        if len(shape) != 4 or shape[3] != BLOCK_BYTES or shape[1] % count or scales.get_shape() != shape[:3]:
            raise ConfigError(
                f"{prefix}_blocks has shape {shape} and {prefix}_scales {scales.get_shape()}. They must be [experts, "
                f"outputs, groups, {BLOCK_BYTES}] and [experts, outputs, groups]. Download the checkpoint again.",
                "model",
            )

        def values(stored: Tensor) -> Tensor:
            return exponent_values(f"{prefix}_scales", stored)

        own = expert, index, count
        return E2M1Matrix(
            Codes(f"{prefix}_blocks", _ExpertRows(blocks, *own), torch.uint8),
            Codes(f"{prefix}_scales", _ExpertRows(scales, *own), torch.uint8),
            values,
            (shape[1] // count, shape[2] * MX_GROUP),
            MX_GROUP,
            e2m1_book(blocks[:1, :1].device),
        )


def _opened(linear: LinearTensors, name: str) -> Stored:
    if name not in linear.names:
        raise ConfigError(f"{name} is missing, which quantized experts need. Download the checkpoint again.", "model")
    return linear.open(name)


@dataclass(frozen=True, slots=True)
class _ExpertRows:
    """One expert's projection in a tensor of all experts, as a matrix [O, bytes]. It has each `step`-th row."""

    stored: Stored  # [E, O * step, bytes] or [E, O * step, blocks, bytes of a block]
    expert: int
    first: int
    step: int

    def get_shape(self) -> list[int]:
        _, rows, columns, *block = self.stored.get_shape()
        return [rows // self.step, columns * (block[0] if block else 1)]

    def __getitem__(self, place: tuple[slice, ...] | EllipsisType) -> Tensor:
        place = (slice(None), slice(None)) if place is ... else place
        (first, stop, _), (begin, end, _) = (
            one.indices(size) for one, size in zip(place, self.get_shape(), strict=True)
        )
        size = (self.stored.get_shape()[3:] or [1])[0]
        blocks = slice(begin // size, -(-end // size))  # only whole blocks can be read
        own = slice(self.expert, self.expert + 1), slice(first * self.step, stop * self.step), blocks
        rows = self.stored[own][0, self.first :: self.step].flatten(1)
        return rows[:, begin - blocks.start * size : end - blocks.start * size]
