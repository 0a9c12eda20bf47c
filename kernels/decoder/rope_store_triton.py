"""Per-head norm, rotation and the paged write of keys and values in one launch. kernels/decoder/rope_store.py is its
twin.

Idea: one program takes BLOCK_HEADS heads of one token, of any kind. Queries are normed, rotated and stored to the
output; keys likewise, but to the cache; values go to the cache unchanged. Each head is held as its two halves, whose
elements form the pairs, so only the norm's sum is exchanged. All arithmetic is fp32 and rounds once, when stored. A
cache of e4m3 gets the numbers of another cache divided by a scale, in a second rounding that saturates, and 0 for NaN.

If values are the keys themselves, the programs of values read the keys' heads. A row that has only queries is stored
nowhere but to the output.

The pairs are (i, i + F) or neighbors. If only the head's first numbers are rotated, the rest are held as pairs too,
behind the others, and rotated by no angle.

Memory: qkv and the adapters' delta are [T, E], where a row is H query heads, G keys, G values, or fewer of these. A
gate may follow each query. qkv may be in sums [K, T, E]. cos and sin are [T, F]. out is [T, H, D]. The caches are [N,
P, G, D], where a token's row is its slot_mapping. A head size that is not a power of two (80, 96) is padded in
registers.
"""

# T tokens · E all heads of q, k and v in one row · H query heads · G KV heads · D head size · F rotated pairs
# N KV blocks · P block size

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from lorafleet.kernels.decoder.rms_norm import NormWeight
from lorafleet.kernels.decoder.rms_norm_triton import norm_weight
from lorafleet.kernels.decoder.rope_store import RowHeads, num_query_heads, num_stored_heads
from lorafleet.kernels.extras.affine_triton import scaled_and_shifted
from lorafleet.kernels.jit import jit
from lorafleet.kernels.linear.split_sums_triton import early_launch, total
from lorafleet.kernels.lora.linear_output import LinearOutput

BLOCK_HEADS = 8


# slot_mapping and rows of addresses begin anywhere in a larger buffer: alignment must not cause another compilation.
@jit(do_not_specialize=["affine_ptr", "own_q_ptr", "own_k_ptr", "slot_ptr"])
def _rotate_and_store_kernel(
    qkv_ptr: tl.tensor,
    delta_ptr: tl.tensor,
    affine_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    q_norm_ptr: tl.tensor,
    k_norm_ptr: tl.tensor,
    own_q_ptr: tl.tensor,
    own_k_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    out_ptr: tl.tensor,
    eps: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    stored_heads: tl.constexpr,
    heads_a_query: tl.constexpr,  # 2 if a gate follows each query, else 1
    head_dim: tl.constexpr,
    pairs: tl.constexpr,
    has_delta: tl.constexpr,
    has_affine: tl.constexpr,
    has_norm: tl.constexpr,
    norms_rotated: tl.constexpr,
    is_interleaved: tl.constexpr,
    norms_values: tl.constexpr,
    has_own: tl.constexpr,
    num_sums: tl.constexpr,
    early: tl.constexpr,
    block_heads: tl.constexpr,
    block_f: tl.constexpr,
) -> None:
    half: tl.constexpr = head_dim // 2
    row_heads: tl.constexpr = heads_a_query * heads + stored_heads
    width: tl.constexpr = row_heads * head_dim
    # It does not launch its dependents early: that is attention, whose kernels may be a library's.
    if early:
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * block_heads + tl.arange(0, block_heads)[:, None]
    f = tl.arange(0, block_f)[None, :]
    low = f
    high = f + half
    if is_interleaved:
        low = tl.where(f < pairs, 2 * f, f + pairs)
        high = tl.where(f < pairs, 2 * f + 1, f + half)
    elif pairs < half:  # only in this case, since it hides from the compiler that f is contiguous
        low = tl.where(f < pairs, f, f + pairs)
        high = tl.where(f < pairs, f + pairs, f + half)
    inside = (head < heads + 2 * kv_heads) & (f < half)
    is_q = head < heads
    is_k = (head >= heads) & (head < heads + kv_heads)
    is_v = head >= heads + kv_heads
    source = head
    if stored_heads == kv_heads:  # values are read from the keys' heads
        source = tl.where(is_v, head - kv_heads, head)
    if heads_a_query > 1:
        source = tl.where(is_q, heads_a_query * source, source + (heads_a_query - 1) * heads)
    offset = (token * row_heads + source) * head_dim
    first = total(qkv_ptr, offset + low, inside, width, num_sums)
    second = total(qkv_ptr, offset + high, inside, width, num_sums)
    if has_delta:
        first += tl.load(delta_ptr + offset + low, mask=inside, other=0.0).to(tl.float32)
        second += tl.load(delta_ptr + offset + high, mask=inside, other=0.0).to(tl.float32)
    if has_affine:
        e = source * head_dim
        first = scaled_and_shifted(first, affine_ptr, token, tl.num_programs(0), e + low, inside)
        second = scaled_and_shifted(second, affine_ptr, token, tl.num_programs(0), e + high, inside)
    cos = tl.load(cos_ptr + token * pairs + f, mask=f < pairs, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * pairs + f, mask=f < pairs, other=0.0).to(tl.float32)
    x, y = first, second
    if norms_rotated:
        x, y = x * cos - y * sin, y * cos + x * sin
    if has_norm:
        mean = tl.sum(x * x + y * y, 1, keep_dims=True) / head_dim
        inverse = tl.rsqrt(mean + eps)
        q_low = norm_weight(q_norm_ptr, own_q_ptr, token, low, f < half, has_own)
        q_high = norm_weight(q_norm_ptr, own_q_ptr, token, high, f < half, has_own)
        k_low = norm_weight(k_norm_ptr, own_k_ptr, token, low, f < half, has_own)
        k_high = norm_weight(k_norm_ptr, own_k_ptr, token, high, f < half, has_own)
        x *= inverse * tl.where(is_q, q_low, k_low)
        y *= inverse * tl.where(is_q, q_high, k_high)
    if not norms_rotated:
        x, y = x * cos - y * sin, y * cos + x * sin
    if norms_values:
        v_inverse = tl.rsqrt(tl.sum(first * first + second * second, 1, keep_dims=True) / head_dim + eps)
        first *= v_inverse
        second *= v_inverse
    first = tl.where(is_v, first, x).to(out_ptr.dtype.element_ty)
    second = tl.where(is_v, second, y).to(out_ptr.dtype.element_ty)

    out_at = (token * heads + head) * head_dim
    tl.store(out_ptr + out_at + low, first, mask=inside & is_q)
    tl.store(out_ptr + out_at + high, second, mask=inside & is_q)
    slot = tl.load(slot_ptr + token)
    if slot < 0:
        return
    if k_ptr.dtype.element_ty == tl.float8e4nv:
        scale = tl.where(is_k, k_scale, v_scale)
        first = to_e4m3(first, scale)
        second = to_e4m3(second, scale)
    k_at = (slot * kv_heads + head - heads) * head_dim
    tl.store(k_ptr + k_at + low, first, mask=inside & is_k)
    tl.store(k_ptr + k_at + high, second, mask=inside & is_k)
    v_at = k_at - kv_heads * head_dim
    tl.store(v_ptr + v_at + low, first, mask=inside & is_v)
    tl.store(v_ptr + v_at + high, second, mask=inside & is_v)


@jit()
def to_e4m3(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Returns x / scale as e4m3, saturated, with 0 for NaN."""
    x = x.to(tl.float32) / scale
    return tl.clamp(tl.where(x == x, x, 0.0), -448.0, 448.0).to(tl.float8e4nv)  # NaN differs from itself


def rotate_and_store_triton(
    qkv: LinearOutput,
    cos_T1F: Tensor,
    sin_T1F: Tensor,
    q_norm: NormWeight | None,
    k_norm: NormWeight | None,
    k_NPGD: Tensor,
    v_NPGD: Tensor,
    slot_mapping_T: Tensor,
    eps: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    norms_rotated: bool = False,
    is_interleaved: bool = False,
    row_heads: RowHeads = "qkv",
    norms_values: bool = False,
) -> Tensor:
    """Computes rotate_and_store, which has checked the shapes. A token with a negative slot_mapping is not stored."""
    qkv_TE, delta_TE, affine_2T, _ = qkv
    qkv.check(reads_sums=True)
    kv_heads, head_dim = k_NPGD.shape[2:]
    stored_heads = num_stored_heads(row_heads, kv_heads)
    heads = num_query_heads(row_heads, qkv_TE.shape[1], kv_heads, head_dim)
    if row_heads == "q":
        kv_heads, k_norm = 0, q_norm
    for tensor in (cos_T1F, sin_T1F, k_NPGD, v_NPGD, slot_mapping_T):
        assert tensor.is_contiguous()
    assert (q_norm is None) == (k_norm is None)
    q_norm_D, own_q_T = (None, None) if q_norm is None else (q_norm.weight, q_norm.own_T)
    k_norm_D, own_k_T = (None, None) if k_norm is None else (k_norm.weight, k_norm.own_T)
    assert (own_q_T is None) == (own_k_T is None)
    pairs = cos_T1F.shape[-1]
    assert cos_T1F.shape == sin_T1F.shape == (qkv_TE.shape[0], 1, pairs)
    assert 2 * pairs <= head_dim and head_dim % 2 == 0
    block_f = triton.next_power_of_2(head_dim // 2)
    out_THD = torch.empty(qkv_TE.shape[0], heads, head_dim, dtype=qkv_TE.dtype, device=qkv_TE.device)
    _rotate_and_store_kernel[(qkv_TE.shape[0], triton.cdiv(heads + 2 * kv_heads, BLOCK_HEADS))](
        qkv.read,
        delta_TE,
        affine_2T,
        cos_T1F,
        sin_T1F,
        q_norm_D,
        k_norm_D,
        own_q_T,
        own_k_T,
        k_NPGD,
        v_NPGD,
        slot_mapping_T,
        out_THD,
        eps,
        k_scale,
        v_scale,
        heads=heads,
        kv_heads=kv_heads,
        stored_heads=stored_heads,
        heads_a_query=2 if row_heads == "qgkv" else 1,
        head_dim=head_dim,
        pairs=pairs,
        has_delta=delta_TE is not None,
        has_affine=affine_2T is not None,
        has_norm=q_norm is not None,
        norms_rotated=norms_rotated,
        is_interleaved=is_interleaved,
        norms_values=norms_values,
        has_own=own_q_T is not None,
        num_sums=qkv.num_sums,
        early=qkv.early,
        block_heads=BLOCK_HEADS,
        block_f=block_f,
        num_warps=max(2, block_f // 64),  # a thread never holds more numbers than of heads of 256
        **early_launch(qkv.early),
    )
    return out_THD
