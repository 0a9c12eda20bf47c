"""Forbids tokens: what a row's mask leaves out gets -inf. On CUDA one launch of kernels/token_mask_triton.py."""

# B rows of logits · N of them with a mask · V vocabulary · W words of 32 tokens

from __future__ import annotations

import torch
from torch import Tensor

NEVER = float("-inf")


def mask_tokens(logits_BV: Tensor, row_N: Tensor, bits_NW: Tensor) -> None:
    """In place, only in the rows of row_N (int64). Bit i of word w (int32) of bits_NW says whether token 32 w + i may
    come; tokens beyond the last word may not, and words beyond the vocabulary say nothing."""
    if logits_BV.is_cuda:
        from lorafleet.kernels.token_mask_triton import mask_tokens_triton  # triton is optional on a CPU

        mask_tokens_triton(logits_BV, row_N, bits_NW)
        return
    num_tokens = logits_BV.shape[1]
    token_V = torch.arange(min(num_tokens, 32 * bits_NW.shape[1]))
    allowed_NV = (bits_NW[:, token_V // 32] >> (token_V % 32)) & 1
    known = len(token_V)
    for row, allowed_V in zip(row_N.tolist(), allowed_NV.bool(), strict=True):
        logits_BV[row, :known].masked_fill_(~allowed_V, NEVER)
        logits_BV[row, known:] = NEVER
