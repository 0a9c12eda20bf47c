"""Forbids tokens: what a row's mask leaves out gets -inf. On CUDA one launch of
kernels/decoder/token_mask_triton.py."""

# B rows of logits · N of them with a mask · V vocabulary · W words of 32 tokens

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

NEVER = float("-inf")


def mask_tokens(logits_BV: Tensor, row_N: Tensor, bits_NW: Tensor) -> None:
    """In place, only in the rows of row_N (int64). Bit i of word w (int32) of bits_NW says whether token 32 w + i may
    come; tokens beyond the last word may not, and words beyond the vocabulary say nothing."""
    if logits_BV.is_cuda:
        from lorafleet.kernels.decoder.token_mask_triton import mask_tokens_triton  # triton is optional on a CPU

        mask_tokens_triton(logits_BV, row_N, bits_NW)
        return
    known = min(logits_BV.shape[1], 32 * bits_NW.shape[1])
    bytes_NW4 = bits_NW.numpy().view(np.uint8)  # torch would make 64 bits of each bit first
    forbidden_NV = torch.from_numpy(np.unpackbits(bytes_NW4, axis=1, count=known, bitorder="little") == 0)
    for row, forbidden_V in zip(row_N.tolist(), forbidden_NV, strict=True):
        logits_BV[row, :known].masked_fill_(forbidden_V, NEVER)
        logits_BV[row, known:] = NEVER
