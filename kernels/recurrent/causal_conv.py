"""A short causal convolution of each channel over a sequence's tokens. SiLU may follow. Sequences go on step by step.

The state of a sequence has its last J inputs, the oldest first. On CUDA it is kernels/recurrent/causal_conv_triton.py.
"""

# T tokens of the step · B sequences · C channels · J earlier tokens that are read · K = J + 1 taps · S state slots

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lorafleet.kernels.recurrent.recurrent_batch import RecurrentBatch


def causal_conv(
    x_TC: Tensor,
    weight_CK: Tensor,
    state_SCJ: Tensor,
    batch: RecurrentBatch,
    bias_C: Tensor | None = None,
    activates: bool = True,
) -> Tensor:
    """Returns silu(bias + sum over k of weight[:, k] * x[t - J + k]) [T, C] in x's dtype, and advances the states in
    place. Without `activates`, there is no silu. The states behind tokens of batch.kept_T are written too.

    x_TC may have any row stride.
    """
    if x_TC.is_cuda:
        from lorafleet.kernels.recurrent.causal_conv_triton import causal_conv_triton  # triton is optional on a CPU

        return causal_conv_triton(x_TC, weight_CK, state_SCJ, batch, bias_C, activates)
    return causal_conv_torch(x_TC, weight_CK, state_SCJ, batch, bias_C, activates)


def causal_conv_torch(
    x_TC: Tensor,
    weight_CK: Tensor,
    state_SCJ: Tensor,
    batch: RecurrentBatch,
    bias_C: Tensor | None = None,
    activates: bool = True,
) -> Tensor:
    def finished(sums_TC: Tensor) -> Tensor:
        sums_TC = sums_TC if bias_C is None else sums_TC + bias_C.float()
        return (F.silu(sums_TC) if activates else sums_TC).to(x_TC.dtype)

    out_TC = torch.empty_like(x_TC, memory_format=torch.contiguous_format)
    if singles := batch.singles():
        b_N = torch.tensor(singles, device=x_TC.device)
        rows_N = batch.start_B[b_N].long()
        seen_NCK = torch.cat((batch.read(state_SCJ, b_N), x_TC[rows_N].unsqueeze(2)), dim=2)
        out_TC[rows_N] = finished((seen_NCK.float() * weight_CK.float()).sum(dim=2))
        batch.write(state_SCJ, seen_NCK[:, :, 1:], b_N)
        batch.keep(state_SCJ, rows_N.tolist(), seen_NCK[:, :, 1:])
    for b, span in batch.spans():
        own = slice(b, b + 1)
        seen_CL = torch.cat((batch.read(state_SCJ, own)[0], x_TC[span].T), dim=1)
        windows_CTK = seen_CL.unfold(1, weight_CK.shape[1], 1)
        out_TC[span] = finished(torch.einsum("ctk,ck->tc", windows_CTK.float(), weight_CK.float()))
        batch.write(state_SCJ, seen_CL[None, :, -state_SCJ.shape[2] :], own)
        if batch.keeps(span):
            batch.keep(
                state_SCJ, range(span.start, span.stop), seen_CL[:, 1:].unfold(1, state_SCJ.shape[2], 1).transpose(0, 1)
            )
    return out_TC
