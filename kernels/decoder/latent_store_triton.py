"""The norm of a latent vector, the rotation of the shared key, and their paged write in one launch.
kernels/decoder/latent_store.py is its twin.

Idea: one program takes one token. It holds the latent vector and the halves of the key, whose elements form the pairs,
in registers. All arithmetic is fp32 and rounds once, when stored. A cache of e4m3 gets the rounded numbers divided by
a scale, as in kernels/decoder/rope_store_triton.py.

Memory: x is [T, E] with rows x_stride apart. cos and sin are [T, F]. The cache is [N, P, 1, E], where a token's row is
its slot_mapping. Sizes that are not powers of two are padded in registers.
"""

# T tokens · E a latent vector and the shared key in one row · F rotated pairs · N KV blocks · P block size

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lorafleet.kernels.decoder.rms_norm import NormWeight
from lorafleet.kernels.decoder.rms_norm_triton import norm_weight
from lorafleet.kernels.decoder.rope_store_triton import to_e4m3
from lorafleet.kernels.jit import jit


# slot_mapping and rows of addresses begin anywhere in a larger buffer: alignment must not cause another compilation.
@jit(do_not_specialize=["own_ptr", "slot_ptr"])
def _store_latent_kernel(
    x_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    own_ptr: tl.tensor,
    cache_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    x_stride: tl.tensor,
    eps: tl.tensor,
    scale: tl.tensor,
    latent_dim: tl.constexpr,
    pairs: tl.constexpr,
    is_interleaved: tl.constexpr,
    has_own: tl.constexpr,
    block_d: tl.constexpr,
    block_f: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token)
    if slot < 0:
        return
    d = tl.arange(0, block_d)
    inside = d < latent_dim
    x_row = x_ptr + token * x_stride
    latent = tl.load(x_row + d, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(latent * latent, 0) / latent_dim + eps)
    latent *= inverse * norm_weight(weight_ptr, own_ptr, token, d, inside, has_own)

    f = tl.arange(0, block_f)
    is_pair = f < pairs
    low = latent_dim + f
    high = low + pairs
    if is_interleaved:
        low = latent_dim + 2 * f
        high = low + 1
    first = tl.load(x_row + low, mask=is_pair, other=0.0).to(tl.float32)
    second = tl.load(x_row + high, mask=is_pair, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + token * pairs + f, mask=is_pair, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * pairs + f, mask=is_pair, other=0.0).to(tl.float32)

    dtype = x_ptr.dtype.element_ty
    latent = latent.to(dtype)
    turned_low = (first * cos - second * sin).to(dtype)
    turned_high = (second * cos + first * sin).to(dtype)
    if cache_ptr.dtype.element_ty == tl.float8e4nv:
        latent = to_e4m3(latent, scale)
        turned_low = to_e4m3(turned_low, scale)
        turned_high = to_e4m3(turned_high, scale)
    row = cache_ptr + slot * (latent_dim + 2 * pairs)
    tl.store(row + d, latent, mask=inside)
    tl.store(row + low, turned_low, mask=is_pair)
    tl.store(row + high, turned_high, mask=is_pair)


def store_latent_triton(
    x_TE: Tensor,
    cos_T1F: Tensor,
    sin_T1F: Tensor,
    norm: NormWeight,
    eps: float,
    cache_NPGE: Tensor,
    slot_mapping_T: Tensor,
    scale: float = 1.0,
    is_interleaved: bool = False,
) -> None:
    """Computes store_latent, which has checked the shapes. A token with a negative slot_mapping is not stored."""
    assert x_TE.stride(1) == 1
    for tensor in (cos_T1F, sin_T1F, cache_NPGE, slot_mapping_T, norm.weight):
        assert tensor.is_contiguous()
    num_tokens, width = x_TE.shape
    pairs = cos_T1F.shape[-1]
    latent_dim = width - 2 * pairs
    _store_latent_kernel[(num_tokens,)](
        x_TE,
        cos_T1F,
        sin_T1F,
        norm.weight,
        norm.own_T,
        cache_NPGE,
        slot_mapping_T,
        x_TE.stride(0),
        eps,
        scale,
        latent_dim=latent_dim,
        pairs=pairs,
        is_interleaved=is_interleaved,
        has_own=norm.own_T is not None,
        block_d=triton.next_power_of_2(latent_dim),
        block_f=max(1, triton.next_power_of_2(pairs)),
        num_warps=4,
    )
