"""Holds the memory of a KV cache and of adapters on one GPU, and moves groups of KV blocks to adapters and back.

A group's memory has a page in each tensor of the KV cache. Lent to adapters, the pages lie one behind the other in a
region of the arena. Both keep their addresses, so block tables, adapters' tables and CUDA graphs stay valid.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate

import torch
from torch import Tensor

from lorafleet.protocol.cuda_driver import CudaDriver, CudaDriverError
from lorafleet.workers.pool.group_layout import PAGE_BYTES, GroupLayout
from lorafleet.workers.pool.mapped_addresses import MappedAddresses


class Arena:
    """The memory for A and B of adapters: pages that it always has, then a region for each group that it may borrow.

    Args:
        own_bytes: Bytes that it always has, rounded up to whole pages, and at least one.
        most_bytes: Bytes that it may have besides.
    """

    def __init__(self, driver: CudaDriver, device: torch.device, own_bytes: int, most_bytes: int) -> None:
        self.own_bytes = max(PAGE_BYTES, _whole_pages(own_bytes))
        self.addresses = MappedAddresses(driver, device, self.own_bytes + _whole_pages(most_bytes))
        self.allocate()
        self.memory = self.addresses.tensor()

    # As SizedStorages, for sleep. Nothing may be borrowed.

    @property
    def num_bytes(self) -> int:
        return self.own_bytes

    def empty(self) -> None:
        self.addresses.release_all()

    def allocate(self) -> None:
        _create(self.addresses, [(0, self.own_bytes)])


class GroupMemory:
    """The tensors of a KV cache, whose last groups but one can be lent to the arena.

    Args:
        num_lendable: Number of these groups.
    """

    def __init__(
        self, driver: CudaDriver, device: torch.device, arena: Arena, layout: GroupLayout, num_lendable: int
    ) -> None:
        self.layout = layout
        self.num_lendable = num_lendable
        self._first_lendable = layout.first_lendable(num_lendable)
        self._arena = arena
        self._device = device
        self._stream = torch.cuda.Stream(device)
        sizes = [part * layout.num_groups for part in layout.part_bytes]
        self._addresses = [MappedAddresses(driver, device, size) for size in sizes]
        self._create()
        self.tensors: list[Tensor] = [addresses.tensor() for addresses in self._addresses]  # uint8 [bytes]
        self._clear()

    def lend(self, group: int, region: int) -> None:
        """Moves a group's memory to a region of the arena, behind all work that is queued on the device and uses the
        group. Waits for nothing itself. It may run in any thread, but not beside another move."""
        parts = self.layout.part_bytes
        pages = [at.take(group * part) for at, part in zip(self._addresses, parts, strict=True)]
        self._arena.addresses.put(self._start(region), pages)

    def give_back(self, group: int, region: int) -> None:
        """Moves the memory of a region to a group, and clears it. Returns when that is done. As lend() otherwise."""
        starts = accumulate(self.layout.part_bytes[:-1], initial=self._start(region))
        with torch.cuda.stream(self._stream):
            for at, tensor, part, start in zip(
                self._addresses, self.tensors, self.layout.part_bytes, starts, strict=True
            ):
                at.put(group * part, [self._arena.addresses.take(start)])
                tensor[group * part : (group + 1) * part].zero_()
        self._stream.synchronize()

    # As SizedStorages, for sleep. No group may be lent.

    @property
    def num_bytes(self) -> int:
        return self.layout.group_bytes * self.layout.num_groups

    def empty(self) -> None:
        for addresses in self._addresses:
            addresses.release_all()

    def allocate(self) -> None:
        self._create()
        self._clear()

    def _create(self) -> None:
        for addresses, part in zip(self._addresses, self.layout.part_bytes, strict=True):
            _create(addresses, self._pages(part))

    def _clear(self) -> None:
        for tensor in self.tensors:
            tensor.zero_()

    def _pages(self, part: int) -> Iterator[tuple[int, int]]:
        """Yields (start, bytes) of the pages of one tensor. Groups that are never lent need no pages of their own."""
        yield 0, self._first_lendable * part
        for group in range(self._first_lendable, self.layout.num_groups):
            yield group * part, part

    def _start(self, region: int) -> int:
        return self._arena.own_bytes + region * self.layout.group_bytes


def _create(addresses: MappedAddresses, pages: Iterable[tuple[int, int]]) -> None:
    """Creates pages, (start, bytes) each, where there are none. Raises RuntimeError, as torch does, if there is not
    enough memory."""
    try:
        for start, num_bytes in pages:
            if not addresses.has_page(start):
                addresses.create(start, num_bytes)
    except CudaDriverError as error:
        raise RuntimeError(str(error)) from error


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
