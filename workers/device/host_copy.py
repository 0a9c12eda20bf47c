"""Copies small tensors between host and device without waiting for either."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_device(values: list[int] | list[float] | list[list[int]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copies the values from pinned memory, since a copy out of other memory would wait for the steps before it."""
    host = torch.tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def array_to_device(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """Copies an array as to_device() copies values."""
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


class Upload:
    """Copies arrays to the device through pinned memory that is reused, since pinning new memory may take
    milliseconds."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = torch.empty(0, dtype=torch.uint8)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def __call__(self, array: np.ndarray[Any, Any]) -> Tensor:
        """Returns the array on the device. The array may be overwritten at once, except on a CPU, where it is the
        tensor's memory."""
        source = torch.from_numpy(array)
        if self._copied is None:
            return source
        if source.nbytes > self._host.nbytes:
            self._host = torch.empty(source.nbytes, dtype=torch.uint8, pin_memory=True)
        else:
            self._copied.synchronize()  # usually long done
        host = self._host[: source.nbytes].view(source.dtype).view(source.shape)
        np.copyto(host.numpy(), array)  # torch would wake its threads, and wait for each of them on a busy machine
        on_device = host.to(self._device, non_blocking=True)
        self._copied.record()
        return on_device


class Download:
    """Tensors on their way to the host: add() each, close() once, and wait() before one is read.

    `check` is called while waiting. It raises if what is waited for will never come.
    """

    def __init__(self, device: torch.device, check: Callable[[], None] | None = None) -> None:
        self._done = torch.cuda.Event() if device.type == "cuda" else None
        self._check = check

    def add(self, tensor: Tensor) -> Tensor:
        """Returns a tensor on the host that receives what `tensor` holds now."""
        if self._done is None:
            return tensor.clone()  # the next step may overwrite it
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        return host

    def close(self) -> None:
        if self._done is not None:
            self._done.record()

    def wait(self) -> None:
        if self._done is None:
            return
        if self._check is not None:
            while not self._done.query():
                self._check()
        self._done.synchronize()
