"""The log softmax of rows of logits. kernels/sampling/row_log_softmax.py has its twin.

Idea: one program takes a row, and reads it three times: for the largest logit, for the sum, and for the result. Each
lane adds every block's number in its place, and the lanes are added at the end. So columns of -inf behind a row, which
other rows' wider vocabularies cause, change no bit.

Memory: logits are [B, V] with a stride between rows; the result is contiguous.
"""

# B rows · V vocabulary, or columns of a block

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.jit import jit

BLOCK_V, NUM_WARPS = 4096, 8


@jit(do_not_specialize=["stride", "num_columns"])
def _row_log_softmax_kernel(
    logits_ptr: tl.tensor, out_ptr: tl.tensor, stride: tl.tensor, num_columns: tl.tensor, block_v: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    out_ptr += row * num_columns
    lane_V = tl.arange(0, block_v)
    largest_V = tl.full([block_v], float("-inf"), tl.float32)
    for first in range(0, num_columns, block_v):
        inside_V = first + lane_V < num_columns
        logit_V = tl.load(logits_ptr + first + lane_V, mask=inside_V, other=float("-inf")).to(tl.float32)
        largest_V = tl.maximum(largest_V, logit_V)
    largest = tl.max(largest_V, axis=0)
    sum_V = tl.zeros([block_v], tl.float32)
    for first in range(0, num_columns, block_v):
        inside_V = first + lane_V < num_columns
        logit_V = tl.load(logits_ptr + first + lane_V, mask=inside_V, other=float("-inf")).to(tl.float32)
        sum_V += tl.where(inside_V, tl.exp(logit_V - largest), 0.0)
    log_sum = tl.log(tl.sum(sum_V, axis=0))
    for first in range(0, num_columns, block_v):
        inside_V = first + lane_V < num_columns
        logit_V = tl.load(logits_ptr + first + lane_V, mask=inside_V, other=float("-inf")).to(tl.float32)
        tl.store(out_ptr + first + lane_V, logit_V - largest - log_sum, mask=inside_V)


def row_log_softmax_triton(logits_BV: Tensor) -> Tensor:
    num_rows, num_columns = logits_BV.shape
    assert logits_BV.stride(1) == 1
    logprobs_BV = torch.empty((num_rows, num_columns), dtype=torch.float32, device=logits_BV.device)
    if num_rows > 0:
        _row_log_softmax_kernel[(num_rows,)](
            logits_BV, logprobs_BV, logits_BV.stride(0), num_columns, block_v=BLOCK_V, num_warps=NUM_WARPS
        )
    return logprobs_BV
