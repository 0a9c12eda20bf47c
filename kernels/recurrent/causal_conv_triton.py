"""The short causal convolution: results, then states, in two launches, or in one if all sequences have one token.
kernels/recurrent/causal_conv.py has its twin.

Idea: a program of the first kernel computes BLOCK_C channels of one token. It reads the tokens before it from x, and
from the sequence's state where they were in earlier steps. A program of the second kernel then shifts BLOCK_C channels
of one sequence's state. The launches are two, because tokens of one sequence are in many programs, which all read the
old state. Where each sequence has one token, its only program of these channels shifts the state as it reads it. A
state that is kept behind a token is what the token's program has read, in a slot that nobody reads.

Memory: x is [T, C] with any row stride, weight is [C, K], bias is [C], and the states are [S, C, J].
"""

# T tokens of the step · B sequences · C channels · J earlier tokens that are read · K = J + 1 taps · S state slots

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.jit import jit
from lorafleet.kernels.recurrent.recurrent_batch import RecurrentBatch

BLOCK_C = 256


@jit(do_not_specialize=["slot_ptr", "new_ptr", "start_ptr", "sequence_ptr", "kept_ptr"])
def _conv_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,  # None without a bias
    state_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    new_ptr: tl.tensor,
    start_ptr: tl.tensor,
    sequence_ptr: tl.tensor,
    kept_ptr: tl.tensor,  # None if no states are kept
    out_ptr: tl.tensor,
    x_stride: tl.tensor,
    channels: tl.constexpr,
    taps: tl.constexpr,
    activates: tl.constexpr,
    shifts: tl.constexpr,
    block_c: tl.constexpr,
) -> None:
    before: tl.constexpr = taps - 1
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * block_c + tl.arange(0, block_c)
    inside = c < channels
    sequence = tl.load(sequence_ptr + token)
    slot = tl.load(slot_ptr + sequence).to(tl.int64)
    has_state = tl.load(new_ptr + sequence) == 0
    place = token - tl.load(start_ptr + sequence)  # of the token among those of its sequence in the step
    sums = tl.zeros((block_c,), tl.float32)
    if kept_ptr is not None:
        kept = tl.load(kept_ptr + token).to(tl.int64)
    for tap in tl.static_range(taps):
        read = place - before + tap
        x = tl.load(x_ptr + (token - before + tap) * x_stride + c, mask=inside & (read >= 0), other=0.0)
        earlier = state_ptr + (slot * channels + c) * before + (before + read)
        held = tl.load(earlier, mask=inside & (read < 0) & has_state, other=0.0)
        if shifts and tap > 0:  # read is tap - before
            tl.store(earlier - 1, tl.where(read >= 0, x, held), mask=inside)
        if kept_ptr is not None and tap > 0:
            behind = state_ptr + (kept * channels + c) * before + (tap - 1)
            tl.store(behind, tl.where(read >= 0, x, held), mask=inside & (kept >= 0))
        weight = tl.load(weight_ptr + c * taps + tap, mask=inside, other=0.0).to(tl.float32)
        sums += weight * (x.to(tl.float32) + held.to(tl.float32))  # one of the two is zero
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + c, mask=inside, other=0.0).to(tl.float32)
    if activates:
        sums *= tl.sigmoid(sums)
    tl.store(out_ptr + token * channels + c, sums.to(out_ptr.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["slot_ptr", "new_ptr", "start_ptr"])
def _shift_kernel(
    x_ptr: tl.tensor,
    state_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    new_ptr: tl.tensor,
    start_ptr: tl.tensor,
    x_stride: tl.tensor,
    channels: tl.constexpr,
    before: tl.constexpr,
    block_c: tl.constexpr,
) -> None:
    sequence = tl.program_id(0)
    c = tl.program_id(1) * block_c + tl.arange(0, block_c)
    inside = c < channels
    slot = tl.load(slot_ptr + sequence).to(tl.int64)
    has_state = tl.load(new_ptr + sequence) == 0
    end = tl.load(start_ptr + sequence + 1).to(tl.int64)
    count = end - tl.load(start_ptr + sequence)
    state = state_ptr + (slot * channels + c) * before
    # Element i becomes element i + count of the old state, or an input. Elements are written in ascending order, so
    # that none is read after it was written.
    for i in tl.static_range(before):
        read = count - before + i
        x = tl.load(x_ptr + (end - before + i) * x_stride + c, mask=inside & (read >= 0), other=0.0)
        held = tl.load(state + i + count, mask=inside & (read < 0) & has_state, other=0.0)
        tl.store(state + i, tl.where(read >= 0, x, held), mask=inside)


def causal_conv_triton(
    x_TC: Tensor,
    weight_CK: Tensor,
    state_SCJ: Tensor,
    batch: RecurrentBatch,
    bias_C: Tensor | None = None,
    activates: bool = True,
) -> Tensor:
    num_tokens, channels = x_TC.shape
    taps = weight_CK.shape[1]
    assert x_TC.stride(1) == 1 and weight_CK.is_contiguous() and state_SCJ.is_contiguous()
    assert weight_CK.shape == (channels, taps) and state_SCJ.shape[1:] == (channels, taps - 1)
    assert bias_C is None or (bias_C.shape == (channels,) and bias_C.is_contiguous())
    assert state_SCJ.dtype == x_TC.dtype and len(batch.sequence_T) == num_tokens
    out_TC = torch.empty(num_tokens, channels, dtype=x_TC.dtype, device=x_TC.device)
    blocks = triton.cdiv(channels, BLOCK_C)
    where = batch.slot_B, batch.is_new_B, batch.start_B
    sizes = {"x_stride": x_TC.stride(0), "channels": channels, "block_c": BLOCK_C, "num_warps": 4}
    is_decode = all(count == 1 for count in batch.query_lens)
    _conv_kernel[num_tokens, blocks](
        *(x_TC, weight_CK, bias_C, state_SCJ, *where, batch.sequence_T, batch.kept_T, out_TC),
        taps=taps,
        activates=activates,
        shifts=is_decode,
        **sizes,
    )
    if not is_decode:
        _shift_kernel[len(batch.slot_B), blocks](x_TC, state_SCJ, *where, before=taps - 1, **sizes)
    return out_TC
