"""One adapter in the serving layout: a single block of bytes for all its matrices, so that a slot is one copy.

Lives in host memory (pinned where there is a GPU) as the CPU tier's entry. On a CPU the slots use it in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lorafleet.kernels.packed_lora import SlotWeights
from lorafleet.workers.lora.layer_weights import LoRALayerWeights
from lorafleet.workers.lora.model import LoRAModel
from lorafleet.workers.lora.request import AdapterInfo

ALIGNMENT = 256  # bytes; what the GPU's allocator gives, so that kernels may load 16 bytes at a time


@dataclass(frozen=True, slots=True)
class Placed:
    """A matrix in the block."""

    offset: int  # bytes
    shape: tuple[int, int]

    def view(self, block: Tensor, dtype: torch.dtype) -> Tensor:
        size = self.shape[0] * self.shape[1] * dtype.itemsize
        return block[self.offset : self.offset + size].view(dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class PlacedLinear:
    """A packed linear's matrices: the slices' A stacked, each slice's B, each slice's scale."""

    a: Placed
    b: tuple[Placed | None, ...]
    scales: tuple[float, ...]

    def weights(self, block: Tensor, dtype: torch.dtype) -> SlotWeights:
        b = tuple(None if placed is None else placed.view(block, dtype) for placed in self.b)
        return SlotWeights(self.a.view(block, dtype), b, self.scales)


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """block: uint8. linears: for each packed linear of the model, in its order, None where the adapter has nothing."""

    info: AdapterInfo
    block: Tensor
    dtype: torch.dtype
    linears: tuple[PlacedLinear | None, ...]

    def slot_weights(self, block: Tensor) -> list[SlotWeights | None]:
        """Views of `block`, a copy of self.block on the serving device or self.block itself."""
        return [None if placed is None else placed.weights(block, self.dtype) for placed in self.linears]


def pack(model: LoRAModel, packed_names: Sequence[tuple[str, ...]], dtype: torch.dtype, pin: bool) -> PackedAdapter:
    """packed_names: the module paths of each packed linear's projections."""
    placed: list[PlacedLinear | None] = []
    end = 0
    for names in packed_names:
        linear, end = _place([model.modules.get(name) for name in names], end, dtype)
        placed.append(linear)
    block = torch.empty(end, dtype=torch.uint8, pin_memory=pin)
    for names, linear in zip(packed_names, placed, strict=True):
        if linear is not None:
            _fill(linear.weights(block, dtype), [model.modules.get(name) for name in names])
    info = AdapterInfo(
        digest=model.digest,
        rank=model.rank,
        num_bytes=end,
        target_modules=sorted({name.rsplit(".", 1)[1] for name in model.modules}),
    )
    return PackedAdapter(info, block, dtype, tuple(placed))


def slot_bytes(packed_shapes: Sequence[tuple[int, tuple[int, ...]]], rank: int, dtype: torch.dtype) -> int:
    """The most that one adapter of this rank on every projection can need."""
    end = 0
    for in_features, out_features in packed_shapes:
        end = _aligned(end + len(out_features) * rank * in_features * dtype.itemsize)
        for out in out_features:
            end = _aligned(end + rank * out * dtype.itemsize)
    return end


def _place(slices: list[LoRALayerWeights | None], end: int, dtype: torch.dtype) -> tuple[PlacedLinear | None, int]:
    present = [s for s in slices if s is not None]
    if not present:
        return None, end
    a = Placed(end, (sum(s.rank for s in present), present[0].a_RD.shape[1]))
    end = _aligned(end + a.shape[0] * a.shape[1] * dtype.itemsize)
    b: list[Placed | None] = []
    for s in slices:
        b.append(None if s is None else Placed(end, (s.b_OR.shape[0], s.rank)))
        if s is not None:
            end = _aligned(end + s.b_OR.numel() * dtype.itemsize)
    return PlacedLinear(a, tuple(b), tuple(0.0 if s is None else s.scaling for s in slices)), end


def _fill(target: SlotWeights, slices: list[LoRALayerWeights | None]) -> None:
    target.a_RD.copy_(torch.cat([s.a_RD for s in slices if s is not None]))
    for b_OR, s in zip(target.b, slices, strict=True):
        if b_OR is not None and s is not None:
            b_OR.copy_(s.b_OR)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
