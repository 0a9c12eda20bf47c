"""The log softmax of rows of logits. On CUDA it is kernels/sampling/row_log_softmax_triton.py.

A row's bits depend on its numbers alone. Those of torch's operator on CUDA depend on the row's address too, by which it
divides the row among threads.
"""

# B rows · V vocabulary

from __future__ import annotations

import torch
from torch import Tensor


def row_log_softmax(logits_BV: Tensor) -> Tensor:
    """Returns the logarithms of the rows' probabilities, float32 [B, V]. Logits may be of any float dtype."""
    if logits_BV.is_cuda:
        from lorafleet.kernels.sampling.row_log_softmax_triton import row_log_softmax_triton  # optional on a CPU

        return row_log_softmax_triton(logits_BV)
    return logits_BV.log_softmax(dim=-1, dtype=torch.float32)
