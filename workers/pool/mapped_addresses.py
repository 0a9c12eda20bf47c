"""Puts memory of a GPU behind addresses that never change, and moves it from some addresses to others.

A tensor over reserved addresses is an ordinary one to torch, to kernels and to CUDA graphs. But addresses without
memory must not be touched: that is an error of the whole process. Mapping does not wait for the GPU, so callers wait
for the steps that may use the memory before they take it away.

Source of the idea: vAttention, Prabhu et al., arXiv 2405.04437, and torch's expandable segments.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lorafleet.protocol.cuda_driver import CudaDriver


@dataclass(frozen=True, slots=True)
class Page:
    """Memory of a GPU that is mapped as a whole."""

    handle: int  # The driver's name for it.
    num_bytes: int  # A multiple of PAGE_BYTES, as all numbers of bytes here are.


class MappedAddresses:
    """Reserved addresses of one GPU, and the pages behind them. Addresses are offsets from the first one."""

    def __init__(self, driver: CudaDriver, device: torch.device, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._driver = driver
        self._device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._first = driver.reserve_addresses(num_bytes)
        self._pages: dict[int, Page] = {}  # By the offset of the first byte.

    @property
    def mapped_bytes(self) -> int:
        return sum(page.num_bytes for page in self._pages.values())

    def has_page(self, start: int) -> bool:
        return start in self._pages

    def create(self, start: int, num_bytes: int) -> None:
        """Puts a new page there. Raises CudaDriverError if there is not enough memory."""
        page = Page(self._driver.create_memory(num_bytes, self._index), num_bytes)
        self.put(start, [page])

    def put(self, start: int, pages: Sequence[Page]) -> None:
        """Maps pages one behind the other."""
        end = start
        for page in pages:
            self._driver.map_memory(self._first + end, page.num_bytes, page.handle)
            self._pages[end] = page
            end += page.num_bytes
        self._driver.allow_access(self._first + start, end - start, self._index)

    def take(self, start: int) -> Page:
        """Takes the page there away, with its content. No work on the GPU may use it any more."""
        page = self._pages.pop(start)
        self._driver.unmap_memory(self._first + start, page.num_bytes)
        return page

    def release_all(self) -> None:
        """Gives the memory of all pages back to the driver. The addresses remain reserved."""
        for start in list(self._pages):
            self._driver.release_memory(self.take(start).handle)

    def tensor(self) -> Tensor:
        """Returns all addresses as a tensor uint8 [num_bytes]. There must be a page at the first one.

        Call it once: memory and addresses are freed with the tensor's storage, as those of any other tensor.
        """
        exposed = _Exposed(self._first, self.num_bytes)
        finalizer = weakref.finalize(
            exposed, _free, self._driver, self._device, self._first, self.num_bytes, self._pages
        )
        finalizer.atexit = False  # the driver frees everything then
        with torch.cuda.device(self._device):
            return torch.as_tensor(exposed, device=self._device)


def _free(driver: CudaDriver, device: torch.device, first: int, num_bytes: int, pages: dict[int, Page]) -> None:
    torch.cuda.synchronize(device)
    for start, page in pages.items():
        driver.unmap_memory(first + start, page.num_bytes)
        driver.release_memory(page.handle)
    driver.free_addresses(first, num_bytes)


class _Exposed:
    """Addresses in the form from which torch makes a tensor without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
