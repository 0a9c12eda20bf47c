"""Merges attention that was computed in parts, each over a part of a query's keys. On CUDA it is one launch of
kernels/decoder/merge_parts_triton.py."""

# T tokens of the result · N tokens that have parts · S parts · H query heads · D numbers of a value

from __future__ import annotations

import torch
from torch import Tensor


def merge_parts(
    out_THD: Tensor, log_sum_TH: Tensor, part_SNHD: Tensor, part_log_sum_SNH: Tensor, row_N: Tensor
) -> None:
    """Adds parts to rows of out, in place. Part s of token n belongs to row row_N[n].

    Each has the result of attention over its own keys, and the base-2 logarithm (fp32) of its softmax's denominator.
    The rows of row_N (int32) are distinct, which is not checked. The sum is fp32 and rounds once.
    Source: the states of FlashInfer's cascade, arXiv 2501.01005.
    """
    num_parts, num_tokens = part_log_sum_SNH.shape[:2]
    assert part_SNHD.shape == (num_parts, num_tokens, *out_THD.shape[1:]) and part_SNHD.dtype == out_THD.dtype
    assert log_sum_TH.shape == out_THD.shape[:2] and part_log_sum_SNH.shape[2:] == log_sum_TH.shape[1:]
    assert log_sum_TH.dtype == part_log_sum_SNH.dtype == torch.float32 and row_N.dtype == torch.int32
    assert len(row_N) == num_tokens
    if out_THD.is_cuda:
        from lorafleet.kernels.decoder.merge_parts_triton import merge_parts_triton  # triton is optional on a CPU

        merge_parts_triton(out_THD, log_sum_TH, part_SNHD, part_log_sum_SNH, row_N)
        return
    all_SNHD = torch.cat((out_THD[row_N.long()].unsqueeze(0), part_SNHD)).float()
    log_sum_SNH = torch.cat((log_sum_TH[row_N.long()].unsqueeze(0), part_log_sum_SNH))
    weight_SNH = (log_sum_SNH * torch.tensor(2.0).log()).softmax(0)
    out_THD[row_N.long()] = (all_SNHD * weight_SNH.unsqueeze(-1)).sum(0).to(out_THD.dtype)
