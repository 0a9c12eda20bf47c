"""Copies KV blocks between the caches and the slots of the host tier: on a CPU at once, on a GPU beside the steps.

On a GPU each direction has a stream and a staging area. A kernel gathers the blocks of all layers into the area, and
one copy for each block brings them to the host, or the other way round. So the copy engines do nearly all of the work.
The compute stream waits only for a gather, since a later step may overwrite the blocks.
"""

# N KV blocks · R rows of the staging area · B bytes of a row

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lorafleet.kernels.decoder.block_copies import BlockCopies
from lorafleet.workers.kv_tiers.host_blocks import HostBlocks

STAGING_BYTES = 64 << 20  # of each direction, at most, but at least one block

Pairs = Sequence[tuple[int, int]]


class BlockMover(Protocol):
    def save(self, pairs: Pairs) -> None:
        """Queues copies from KV blocks to host slots, (block, slot) each. Steps that are launched later may overwrite
        the blocks."""

    def load(self, pairs: Pairs) -> torch.cuda.Event | None:
        """Queues copies from host slots to KV blocks, (slot, block) each, behind the steps that were launched before.

        Returns the event that ends them, or None if they are done.
        """

    def last_copy(self, slot: int) -> torch.cuda.Event | None:
        """Returns the event that ends the last copy from or to a host slot, or None if there is none to wait for."""

    def wait(self) -> None:
        """Waits for all copies."""

    def find_addresses(self) -> None:
        """Must be called after the caches have got other memory."""


class HostMover:
    """A BlockMover for caches on a CPU."""

    def __init__(self, copies: BlockCopies, host: HostBlocks) -> None:
        self._copies = copies
        self._host = host

    @torch.inference_mode()
    def save(self, pairs: Pairs) -> None:
        for block, slot in pairs:
            self._copies.to_rows([block], self._host.slot(slot)[None])

    @torch.inference_mode()
    def load(self, pairs: Pairs) -> None:
        for slot, block in pairs:
            self._copies.from_rows(self._host.slot(slot)[None], [block])

    def last_copy(self, slot: int) -> None:  # noqa: ARG002  # as BlockMover
        return None

    def wait(self) -> None:
        pass

    def find_addresses(self) -> None:
        self._copies.find_addresses()


class StreamMover:
    """A BlockMover for caches on a GPU."""

    def __init__(self, copies: BlockCopies, host: HostBlocks, device: torch.device) -> None:
        num_rows = staging_rows(host.slot_bytes)
        self._copies = copies
        self._host = host
        self._device = device
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._leaving_RB, self._arriving_RB = (
            torch.empty(num_rows, host.slot_bytes, dtype=torch.uint8, device=device) for _ in range(2)
        )
        self._last: dict[int, torch.cuda.Event] = {}  # the event of the last copy of each slot

    @torch.inference_mode()
    def warm_up(self, block: int) -> None:
        """Compiles the kernels, with copies of a block that leave its content as it is."""
        self._copies.to_rows([block], self._leaving_RB[:1])
        self._copies.from_rows(self._leaving_RB[:1], [block])
        torch.cuda.synchronize(self._device)

    @torch.inference_mode()
    def save(self, pairs: Pairs) -> None:
        compute = torch.cuda.current_stream(self._device)
        self._out.wait_stream(compute)
        gathered, saved = torch.cuda.Event(), torch.cuda.Event()
        with torch.cuda.stream(self._out):
            for piece in _pieces(pairs, len(self._leaving_RB)):
                self._copies.to_rows([block for block, _ in piece], self._leaving_RB[: len(piece)])
                gathered.record(self._out)  # the last one counts
                for row_B, (_, slot) in zip(self._leaving_RB, piece, strict=False):
                    self._after_last_copy(slot, self._out)
                    self._host.slot(slot).copy_(row_B, non_blocking=True)
            saved.record(self._out)
        compute.wait_event(gathered)
        for _, slot in pairs:
            self._last[slot] = saved

    @torch.inference_mode()
    def load(self, pairs: Pairs) -> torch.cuda.Event:
        self._in.wait_stream(torch.cuda.current_stream(self._device))
        loaded = torch.cuda.Event()
        with torch.cuda.stream(self._in):
            for piece in _pieces(pairs, len(self._arriving_RB)):
                for row_B, (slot, _) in zip(self._arriving_RB, piece, strict=False):
                    self._after_last_copy(slot, self._in)
                    row_B.copy_(self._host.slot(slot), non_blocking=True)
                self._copies.from_rows(self._arriving_RB[: len(piece)], [block for _, block in piece])
            loaded.record(self._in)
        for slot, _ in pairs:
            self._last[slot] = loaded
        return loaded

    def last_copy(self, slot: int) -> torch.cuda.Event | None:
        return self._last.get(slot)

    def wait(self) -> None:
        self._out.synchronize()
        self._in.synchronize()

    def find_addresses(self) -> None:
        self._copies.find_addresses()

    def _after_last_copy(self, slot: int, stream: torch.cuda.Stream) -> None:
        """Lets a copy wait for the last one of its slot, which may be on the other stream."""
        event = self._last.pop(slot, None)
        if event is not None:
            stream.wait_event(event)


def staging_rows(slot_bytes: int) -> int:
    """Returns the number of blocks in the staging area of each direction."""
    return max(1, STAGING_BYTES // slot_bytes)


def _pieces(pairs: Pairs, size: int) -> list[list[tuple[int, int]]]:
    return [list(pairs[start : start + size]) for start in range(0, len(pairs), size)]


def cache_tensors(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Returns the tensors that hold blocks, given the keys and values of each layer.

    Layers may share a cache, and values may be a part of their keys.
    """
    tensors: dict[int, Tensor] = {}
    for k_NPGD, v_NPGD in pairs:
        for tensor in (k_NPGD, v_NPGD):
            if tensor.is_contiguous():
                tensors.setdefault(tensor.untyped_storage().data_ptr(), tensor)
    return list(tensors.values())
