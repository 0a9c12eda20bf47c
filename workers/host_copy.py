"""Small tensors between host and device without waiting for either."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_device(values: list[int] | list[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """From pinned memory, since a copy out of other memory would wait for the steps before it."""
    host = torch.tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def array_to_device(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


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
