"""Lets the outputs of captured graphs share memory. A pool gives memory that no tensor holds to the next capture, so
graphs that run one after another need no more than the largest of them."""

from __future__ import annotations

import torch
from torch import Tensor


class _Memory:
    def __init__(self, tensor: Tensor) -> None:
        as_bytes = tensor.view(torch.uint8)
        self.__cuda_array_interface__ = {
            "shape": tuple(as_bytes.shape),
            "typestr": "|u1",
            "data": (as_bytes.data_ptr(), False),
            "version": 2,
        }


def borrowed(tensor: Tensor) -> Tensor:
    """Returns a view of the same memory that does not reserve it in its pool.

    The view is valid from a replay of the graph that writes it to the next replay of any graph of the pool.
    """
    assert tensor.is_contiguous()
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)
