"""Forbids tokens by bit-packed masks in one launch. kernels/decoder/token_mask.py has its twin.

Idea: a program takes BLOCK_V tokens of one masked row and writes -inf where the bit is 0. It never reads logits, and
rows without a mask are not touched.

Memory: logits are [B, V], and their stride separates the rows. bits is [N, W] int32, with token 32 w + i in bit i of
word w.
"""

# B rows of logits · N of them with a mask · V vocabulary · W words of 32 tokens

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.jit import jit

BLOCK_V = 4096


@jit()
def _mask_tokens_kernel(
    logits_ptr: tl.tensor,
    row_ptr: tl.tensor,
    bits_ptr: tl.tensor,
    stride: tl.tensor,
    num_tokens: tl.tensor,
    num_words: tl.tensor,
    block_v: tl.constexpr,
) -> None:
    n = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * block_v + tl.arange(0, block_v)
    row = tl.load(row_ptr + n)
    word = tl.load(bits_ptr + n * num_words + token // 32, mask=token // 32 < num_words, other=0)
    forbidden = ((word >> (token % 32)) & 1) == 0
    never = tl.full([block_v], float("-inf"), logits_ptr.dtype.element_ty)
    tl.store(logits_ptr + row * stride + token, never, mask=forbidden & (token < num_tokens))


def mask_tokens_triton(logits_BV: Tensor, row_N: Tensor, bits_NW: Tensor) -> None:
    num_rows, num_tokens = len(row_N), logits_BV.shape[1]
    assert logits_BV.stride(1) == 1 and bits_NW.is_contiguous()
    assert bits_NW.dtype == torch.int32 and row_N.dtype == torch.int64 and len(bits_NW) == num_rows
    grid = (num_rows, triton.cdiv(num_tokens, BLOCK_V))
    _mask_tokens_kernel[grid](
        logits_BV, row_N, bits_NW, logits_BV.stride(0), num_tokens, bits_NW.shape[1], block_v=BLOCK_V, num_warps=4
    )
