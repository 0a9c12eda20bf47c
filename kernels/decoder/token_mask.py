"""Forbids the tokens that a row's mask leaves out: their logits become -inf. On CUDA this is one launch of
kernels/decoder/token_mask_triton.py."""

# B rows of logits · N of them with a mask · V vocabulary · W words of 32 tokens

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

NEVER = float("-inf")


def mask_tokens(logits_BV: Tensor, row_N: Tensor, bits_NW: Tensor) -> None:
    """Masks the logits in place, in the rows of row_N (int64) only.

    Bit i of word w (int32) of bits_NW says whether token 32 w + i is allowed. Tokens beyond the last word are
    forbidden, and words beyond the vocabulary are ignored.
    """
    if logits_BV.is_cuda:
        from lorafleet.kernels.decoder.token_mask_triton import mask_tokens_triton  # triton is optional on a CPU

        mask_tokens_triton(logits_BV, row_N, bits_NW)
        return
    known = min(logits_BV.shape[1], 32 * bits_NW.shape[1])
    bytes_NW4 = bits_NW.numpy().view(np.uint8)  # torch would expand each bit to 64 bits first
    forbidden_NV = torch.from_numpy(np.unpackbits(bytes_NW4, axis=1, count=known, bitorder="little") == 0)
    for row, forbidden_V in zip(row_N.tolist(), forbidden_NV, strict=True):
        logits_BV[row, :known].masked_fill_(forbidden_V, NEVER)
        logits_BV[row, known:] = NEVER
