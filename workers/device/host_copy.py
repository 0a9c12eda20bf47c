"""Small tensors between host and device without waiting for either."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_device(values: list[int] | list[float] | list[list[int]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """From pinned memory, since a copy out of other memory would wait for the steps before it."""
    host = torch.tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


class Upload:
    """Arrays to the device by pinned memory that is kept: to pin some anew may take milliseconds."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = torch.empty(0, dtype=torch.uint8)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def __call__(self, array: np.ndarray[Any, Any]) -> Tensor:
        """It may be overwritten at once. On a CPU the tensor is the array itself."""
        source = torch.from_numpy(array)
        if self._copied is None:
            return source
        if source.nbytes > self._host.nbytes:
            self._host = torch.empty(source.nbytes, dtype=torch.uint8, pin_memory=True)
        else:
            self._copied.synchronize()  # as a rule long over
        host = self._host[: source.nbytes].view(source.dtype).view(source.shape).copy_(source)
        on_device = host.to(self._device, non_blocking=True)
        self._copied.record()
        return on_device


class Download:
    """Tensors on their way to the host: add() each, close() once, and wait() before one is read.

    check: called while waiting; raises where what is waited for will never come.
    """

    def __init__(self, device: torch.device, check: Callable[[], None] | None = None) -> None:
        self._done = torch.cuda.Event() if device.type == "cuda" else None
        self._check = check

    def add(self, tensor: Tensor) -> Tensor:
        """What `tensor` holds now, on the host."""
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
