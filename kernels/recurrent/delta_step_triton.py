"""A gated delta net between its linears in one launch, for few sequences of one token each.
kernels/recurrent/delta_step.py has its twin.

Idea: a program takes one value head of one sequence, with its memory in registers. It computes b and a of its
head, convolves the query and the key of its key head and its own value, advances the memory, and norms the result. It
reads the memory, which no kernel of the step has written, before it waits for the kernel ahead.

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
def _mixed(
    x: tl.tensor,
    channel: tl.tensor,
    inside: tl.tensor,
    weight_ptr: tl.tensor,
    state_ptr: tl.tensor,
    has_state: tl.tensor,
    before: tl.constexpr,
    shifts: tl.constexpr,
) -> tl.tensor:
    """Returns SiLU of the convolution of some channels, rounded to x's dtype, in float32. It may shift their states."""
    taps: tl.constexpr = before + 1
    state = state_ptr + channel * before
    sums = tl.zeros(x.shape, tl.float32)
    for tap in tl.static_range(before):
        held = tl.load(state + tap, mask=inside & has_state, other=0.0)
        if shifts and tap > 0:
            tl.store(state + tap - 1, held, mask=inside)
        sums += tl.load(weight_ptr + channel * taps + tap, mask=inside, other=0.0).to(tl.float32) * held.to(tl.float32)
    if shifts:
        tl.store(state + before - 1, x, mask=inside)
    sums += tl.load(weight_ptr + channel * taps + before, mask=inside, other=0.0).to(tl.float32) * x.to(tl.float32)
    return (sums * tl.sigmoid(sums)).to(x.dtype).to(tl.float32)


@jit()
def _shift(
    x: tl.tensor,
    channel: tl.tensor,
    inside: tl.tensor,
    state_ptr: tl.tensor,
    has_state: tl.tensor,
    before: tl.constexpr,
) -> None:
    """Shifts the states of some channels."""
    state = state_ptr + channel * before
    for tap in tl.static_range(before - 1):
        tl.store(state + tap, tl.load(state + tap + 1, mask=inside & has_state, other=0.0), mask=inside)
    tl.store(state + before - 1, x, mask=inside)


@jit()
def _product(
    x_ptr: tl.tensor, w_ptr: tl.tensor, row: tl.tensor, size: tl.constexpr, block_d: tl.constexpr, dtype: tl.constexpr
) -> tl.tensor:
    """Returns a row of W times x, rounded to the dtype, in float32."""
    d = tl.arange(0, block_d)
    w = tl.load(w_ptr + row.to(tl.int64) * size + d, mask=d < size, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + d, mask=d < size, other=0.0).to(tl.float32)
    return tl.sum(w * x, 0).to(dtype).to(tl.float32)


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
    k, v = tl.arange(0, block_k), tl.arange(0, block_v)
    in_k, in_v = k < k_dim, v < v_dim
    slot = tl.load(slot_ptr + token).to(tl.int64)
    has_state = tl.load(new_ptr + token) == 0
    place = memory_ptr + ((slot * heads + head) * k_dim + k[:, None]) * v_dim + v[None, :]
    in_memory = in_k[:, None] & in_v[None, :]
    memory = tl.load(place, mask=in_memory & has_state, other=0.0)
    if early:
        gdc_wait()
    row = token * first_width
    # The query and the key are one vector here: a vector with fewer numbers than threads would be loaded several times.
    both = tl.arange(0, 2 * block_k)
    is_key, of_either = both >= block_k, both % block_k
    in_both = of_either < k_dim
    both_place = tl.where(is_key, k_first + key_head * k_group, q_first + key_head * q_group) + of_either
    qk = total(first_ptr, row + both_place, in_both, first_width, num_sums).to(dtype)
    value_place = v_first + key_head * v_group + of_key_head * v_dim + v
    value = total(first_ptr, row + value_place, in_v, first_width, num_sums).to(dtype)
    states = conv_ptr + slot * ((2 * keys + heads * v_dim) * before)
    qk_channel = tl.where(is_key, keys, 0) + key_head * k_dim + of_either
    mixed = _mixed(qk, qk_channel, in_both, conv_weight_ptr, states, has_state, before, ratio == 1)
    v_V = _mixed(value, 2 * keys + head * v_dim + v, in_v, conv_weight_ptr, states, has_state, before, True)
    mixed = tl.reshape(mixed, (2, block_k))
    mixed *= tl.rsqrt(tl.sum(mixed * mixed, axis=1) + length_eps)[:, None]
    q_K, k_K = tl.split(tl.trans(mixed))
    q_K *= k_dim**-0.5
    b_place = b_first + key_head * b_group + of_key_head
    a_place = a_first + key_head * a_group + of_key_head
    b = _product(x_ptr + token * size, second_ptr, b_place, size, block_d, dtype)
    a = _product(x_ptr + token * size, second_ptr, a_place, size, block_d, dtype)
    memory *= tl.exp(-tl.exp(tl.load(a_log_ptr + head)) * softplus(a + tl.load(dt_bias_ptr + head)))
    correction_V = tl.sigmoid(b) * beta_scale * (v_V - tl.sum(memory * k_K[:, None], axis=0))
    memory += k_K[:, None] * correction_V[None, :]
    out = tl.sum(memory * q_K[:, None], axis=0).to(dtype).to(tl.float32)
    tl.store(place, memory, mask=in_memory)
    gate_place = row + gate_first + key_head * gate_group + of_key_head * v_dim + v
    gate = total(first_ptr, gate_place, in_v, first_width, num_sums).to(dtype).to(tl.float32)
    weight = tl.load(norm_ptr + v, mask=in_v, other=0.0).to(tl.float32)
    out = out * tl.rsqrt(tl.sum(out * out, axis=0) / v_dim + eps) * weight * (gate * tl.sigmoid(gate))
    tl.store(out_ptr + (token * heads + head) * v_dim + v, out.to(dtype), mask=in_v)
    if ratio > 1:
        tl.debug_barrier()  # all threads have read the states before one of them counts
        arrived = arrived_ptr + token * key_heads + key_head
        if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == ratio - 1:
            tl.store(arrived, 0)
            _shift(qk, qk_channel, in_both, states, has_state, before)


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
    channels, columns, groups = (
        2 * weights.num_k_heads * k_dim + num_heads * v_dim,
        weights.columns,
        weights.num_k_heads,
    )
    taps = weights.conv_CK.shape[1]
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
        **_places(columns),
        key_heads=groups,
        ratio=num_heads // groups,
        k_dim=k_dim,
        v_dim=v_dim,
        before=taps - 1,
        beta_scale=weights.beta_scale,
        length_eps=NORM_EPS,
        eps=weights.eps,
        early=weights.early,
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
