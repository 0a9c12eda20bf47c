"""A gated delta net between its linears in one launch, for few sequences of one token each.
kernels/recurrent/delta_step.py has its twin.

Idea: a program takes one value head of one sequence, with its memory in registers. It computes b and a of its
head, convolves the query and the key of its key head and its own value, advances the memory, and norms the result. It
reads what no other kernel of the step writes, such as the memory, before it waits for the kernel ahead.

The value heads of a key head read the same states of the convolution. The last of them to have read shifts these; a
counter tells which one that is. Each shifts those of its own values.

Memory: the linears' outputs are as DeltaColumns says; the first one's may be in sums [K, T, N]. The memories are
float32 [S, H, K, V], and the states of the convolution [S, C, J].
"""

# T tokens, each of another sequence · D hidden size · C channels · J earlier tokens that the convolution reads
# H value heads · G key heads · K numbers of a key · V numbers of a value · S state slots · N outputs of a linear

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lorafleet.kernels.jit import jit
from lorafleet.kernels.linear.split_sums_triton import early_launch, total
from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.recurrent.delta_rule import NORM_EPS
from lorafleet.kernels.recurrent.delta_step import (
    MOST_TOKENS,
    DeltaColumns,
    DeltaWeights,
)
from lorafleet.kernels.recurrent.recurrent_batch import RecurrentBatch
from lorafleet.kernels.softplus_triton import softplus

WARPS = 8


@jit()
def _earlier(
    state_ptr: tl.tensor,
    channel: tl.tensor,
    inside: tl.tensor,
    has_state: tl.tensor,
    before: tl.constexpr,
    block_j: tl.constexpr,
) -> tl.tensor:
    """Returns the earlier inputs of some channels, [channels, block_j]."""
    j = tl.arange(0, block_j)[None, :]
    place = state_ptr + channel[:, None] * before + j
    return tl.load(place, mask=inside[:, None] & (j < before) & has_state, other=0.0)


@jit()
def _taps(
    weight_ptr: tl.tensor, channel: tl.tensor, inside: tl.tensor, before: tl.constexpr, block_j: tl.constexpr
) -> tl.tensor:
    """Returns the weights of some channels, [channels, block_j]."""
    j = tl.arange(0, block_j)[None, :]
    place = weight_ptr + channel[:, None] * (before + 1) + j
    return tl.load(place, mask=inside[:, None] & (j <= before), other=0.0).to(tl.float32)


@jit()
def _convolved(seen: tl.tensor, taps: tl.tensor) -> tl.tensor:
    """Returns SiLU of the convolution, rounded to the inputs' dtype, in float32."""
    sums = tl.sum(seen.to(tl.float32) * taps, 1)
    return (sums * tl.sigmoid(sums)).to(seen.dtype).to(tl.float32)


@jit()
def _shift(
    state_ptr: tl.tensor,
    channel: tl.tensor,
    inside: tl.tensor,
    seen: tl.tensor,
    before: tl.constexpr,
    block_j: tl.constexpr,
) -> None:
    """Writes the inputs of some channels but the first, [channels, block_j], where the earlier ones were."""
    j = tl.arange(0, block_j)[None, :]
    place = state_ptr + channel[:, None] * before + j - 1
    tl.store(place, seen, mask=inside[:, None] & (j > 0) & (j <= before))


@jit(do_not_specialize=["slot_ptr", "new_ptr"])
def _delta_step_kernel(
    first_ptr: tl.tensor,
    x_ptr: tl.tensor,
    second_ptr: tl.tensor,
    conv_weight_ptr: tl.tensor,
    a_log_ptr: tl.tensor,
    dt_bias_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    conv_ptr: tl.tensor,
    memory_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    new_ptr: tl.tensor,
    arrived_ptr: tl.tensor,
    out_ptr: tl.tensor,
    first_width: tl.constexpr,
    size: tl.constexpr,
    num_sums: tl.constexpr,
    q_first: tl.constexpr,
    q_group: tl.constexpr,
    k_first: tl.constexpr,
    k_group: tl.constexpr,
    v_first: tl.constexpr,
    v_group: tl.constexpr,
    gate_first: tl.constexpr,
    gate_group: tl.constexpr,
    b_first: tl.constexpr,
    b_group: tl.constexpr,
    a_first: tl.constexpr,
    a_group: tl.constexpr,
    key_heads: tl.constexpr,
    ratio: tl.constexpr,
    k_dim: tl.constexpr,
    v_dim: tl.constexpr,
    before: tl.constexpr,
    beta_scale: tl.constexpr,
    length_eps: tl.constexpr,
    eps: tl.constexpr,
    early: tl.constexpr,
    block_j: tl.constexpr,
    block_k: tl.constexpr,
    block_v: tl.constexpr,
    block_d: tl.constexpr,
) -> None:
    if early:
        gdc_launch_dependents()
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    keys: tl.constexpr = key_heads * k_dim
    heads: tl.constexpr = key_heads * ratio
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key_head, of_key_head = head // ratio, head % ratio
    k, v, d = tl.arange(0, block_k), tl.arange(0, block_v), tl.arange(0, block_d)
    in_v, in_d = v < v_dim, d < size
    # The query and the key are one vector here: a vector with fewer numbers than threads would be loaded several times.
    both = tl.arange(0, 2 * block_k)
    is_key, of_either = both >= block_k, both % block_k
    in_both = of_either < k_dim
    qk_channel = tl.where(is_key, keys, 0) + key_head * k_dim + of_either
    v_channel = 2 * keys + head * v_dim + v
    # All loads come first, since a warp waits for the first number that it needs.
    slot = tl.load(slot_ptr + token).to(tl.int64)
    has_state = tl.load(new_ptr + token) == 0
    b_row = second_ptr + (b_first + key_head * b_group + of_key_head).to(tl.int64) * size
    a_row = second_ptr + (a_first + key_head * a_group + of_key_head).to(tl.int64) * size
    b_D, a_D = tl.load(b_row + d, mask=in_d, other=0.0), tl.load(a_row + d, mask=in_d, other=0.0)
    qk_taps = _taps(conv_weight_ptr, qk_channel, in_both, before, block_j)
    v_taps = _taps(conv_weight_ptr, v_channel, in_v, before, block_j)
    a_log, dt_bias = tl.load(a_log_ptr + head), tl.load(dt_bias_ptr + head)
    norm_V = tl.load(norm_ptr + v, mask=in_v, other=0.0)
    states = conv_ptr + slot * ((2 * keys + heads * v_dim) * before)
    qk_seen = _earlier(states, qk_channel, in_both, has_state, before, block_j)
    v_seen = _earlier(states, v_channel, in_v, has_state, before, block_j)
    place = memory_ptr + ((slot * heads + head) * k_dim + k[:, None]) * v_dim + v[None, :]
    in_memory = (k < k_dim)[:, None] & in_v[None, :]
    memory = tl.load(place, mask=in_memory & has_state, other=0.0)
    if early:
        gdc_wait()
    row = token * first_width
    qk_place = tl.where(is_key, k_first + key_head * k_group, q_first + key_head * q_group) + of_either
    of_values = of_key_head * v_dim + v
    x_D = tl.load(x_ptr + token * size + d, mask=in_d, other=0.0).to(tl.float32)
    qk = total(first_ptr, row + qk_place, in_both, first_width, num_sums).to(dtype)
    value = total(first_ptr, row + v_first + key_head * v_group + of_values, in_v, first_width, num_sums).to(dtype)
    gate = total(first_ptr, row + gate_first + key_head * gate_group + of_values, in_v, first_width, num_sums)

    b = tl.sum(b_D.to(tl.float32) * x_D, 0).to(dtype).to(tl.float32)
    a = tl.sum(a_D.to(tl.float32) * x_D, 0).to(dtype).to(tl.float32)
    j = tl.arange(0, block_j)[None, :]
    qk_seen = tl.where(j == before, qk[:, None], qk_seen)
    v_seen = tl.where(j == before, value[:, None], v_seen)
    v_V = _convolved(v_seen, v_taps)
    mixed = tl.reshape(_convolved(qk_seen, qk_taps), (2, block_k))
    mixed *= tl.rsqrt(tl.sum(mixed * mixed, axis=1) + length_eps)[:, None]
    q_K, k_K = tl.split(tl.trans(mixed))
    q_K *= k_dim**-0.5
    memory *= tl.exp(-tl.exp(a_log) * softplus(a + dt_bias))
    correction_V = tl.sigmoid(b) * beta_scale * (v_V - tl.sum(memory * k_K[:, None], axis=0))
    memory += k_K[:, None] * correction_V[None, :]
    out = tl.sum(memory * q_K[:, None], axis=0).to(dtype).to(tl.float32)
    gate = gate.to(dtype).to(tl.float32)
    out *= tl.rsqrt(tl.sum(out * out, axis=0) / v_dim + eps) * norm_V.to(tl.float32) * (gate * tl.sigmoid(gate))
    tl.store(out_ptr + (token * heads + head) * v_dim + v, out.to(dtype), mask=in_v)
    tl.store(place, memory, mask=in_memory)
    _shift(states, v_channel, in_v, v_seen, before, block_j)
    is_last = True
    if ratio > 1:
        tl.debug_barrier()  # all threads have read the states before one of them counts
        arrived = arrived_ptr + token * key_heads + key_head
        is_last = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == ratio - 1
    if is_last:
        if ratio > 1:
            tl.store(arrived, 0)
        _shift(states, qk_channel, in_both, qk_seen, before, block_j)


def delta_step_triton(
    first: LinearOutput,
    x_TD: Tensor,
    weights: DeltaWeights,
    conv_SCJ: Tensor,
    memory_SHKV: Tensor,
    batch: RecurrentBatch,
) -> Tensor:
    first.check(reads_sums=True)
    assert first.delta_TO is None and first.affine_2T is None
    (num_tokens, first_width), (_, num_heads, k_dim, v_dim) = first.y_TO.shape, memory_SHKV.shape
    groups, taps = weights.num_k_heads, weights.conv_CK.shape[1]
    channels = 2 * groups * k_dim + num_heads * v_dim
    assert weights.conv_CK.shape == (channels, taps) and conv_SCJ.shape[1:] == (channels, taps - 1)
    assert weights.conv_CK.is_contiguous() and conv_SCJ.is_contiguous() and memory_SHKV.is_contiguous()
    assert conv_SCJ.dtype == first.y_TO.dtype and memory_SHKV.dtype is torch.float32
    assert weights.arrived_TG.shape == (MOST_TOKENS, groups) and weights.norm_V.is_contiguous()
    size = x_TD.shape[1]
    assert x_TD.is_contiguous() and weights.second_ND.is_contiguous() and weights.second_ND.shape[1] == size
    out_THV = torch.empty(num_tokens, num_heads, v_dim, dtype=first.y_TO.dtype, device=first.y_TO.device)
    _delta_step_kernel[num_tokens, num_heads](
        *(first.read, x_TD, weights.second_ND, weights.conv_CK, weights.a_log_H, weights.dt_bias_H, weights.norm_V),
        *(conv_SCJ, memory_SHKV, batch.slot_B, batch.is_new_B, weights.arrived_TG, out_THV),
        first_width=first_width,
        size=size,
        num_sums=first.num_sums,
        **_places(weights.columns),
        key_heads=groups,
        ratio=num_heads // groups,
        k_dim=k_dim,
        v_dim=v_dim,
        before=taps - 1,
        beta_scale=weights.beta_scale,
        length_eps=NORM_EPS,
        eps=weights.eps,
        early=weights.early,
        block_j=triton.next_power_of_2(taps),
        block_k=triton.next_power_of_2(k_dim),
        block_v=triton.next_power_of_2(v_dim),
        block_d=triton.next_power_of_2(size),
        num_warps=WARPS,
        **early_launch(weights.early),
    )
    return out_THV


def _places(columns: DeltaColumns) -> dict[str, int]:
    named = {"q": columns.q, "k": columns.k, "v": columns.v, "gate": columns.gate, "b": columns.b, "a": columns.a}
    return {f"{name}_{field}": value for name, at in named.items() for field, value in at._asdict().items()}
