"""Small lists from the host to the device without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(values: list[int] | list[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """From pinned memory, since a copy out of other memory would wait for the steps before it."""
    host = torch.tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
