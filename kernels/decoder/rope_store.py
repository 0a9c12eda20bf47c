"""The work between the GEMM of q, k and v and attention: per-head norm, rotation, and the write of k and v to the
paged cache. On CUDA all of it is one launch of kernels/decoder/rope_store_triton.py."""

# T tokens · E all heads of q, k and v in one row · H query heads · G KV heads · D head size · F rotated pairs
# N KV blocks · P block size

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lorafleet.kernels.decoder.rms_norm import NormWeight, rms_norm
from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.quant.fp8 import FP8, FP8_MAX

# The heads in a row. "qgkv": behind each query lies a gate (head_gate.py), which is not read here. "qk": a head's value
# is its key, as it is before the norm and the rotation. "q": the layer reads another layer's cache, and nothing is
# stored.
RowHeads = Literal["qkv", "qgkv", "qk", "q"]


def rotate_and_store(
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
    *,
    norms_rotated: bool = False,
    is_interleaved: bool = False,
    row_heads: RowHeads = "qkv",
    norms_values: bool = False,
) -> Tensor:
    """Returns the rotated queries [T, H, D] of qkv, and writes each token's key and value to the cache.

    A cache of float8_e4m3fn holds keys and values divided by k_scale and v_scale, and +-448 for numbers out of its
    range. It holds 0 instead of NaN, since blocks go from one sequence to another: FlashInfer's XQA multiplies values
    that an earlier sequence has left behind a later one's last token by weights of 0. Other caches have qkv's dtype and
    no scales. q_norm and k_norm are both weights of RMS norms over D, or both None. norms_rotated applies them after
    the rotation instead of before. The first 2 F numbers of each head are rotated; usually that is all of them.
    is_interleaved is as in RopeConfig. norms_values applies an RMS norm without weights to each value. If row_heads is
    "q", k_norm is None, and the caches only say how many heads there are and of which size.

    slot_mapping_T is int64 and has block * P + offset. On CUDA a negative one (the padding of a CUDA graph) stores
    nothing.
    """
    qkv_TE = qkv.y_TO
    num_tokens, width = qkv_TE.shape
    num_kv_heads, head_dim = k_NPGD.shape[2:]
    num_stored = num_stored_heads(row_heads, num_kv_heads)
    num_heads = num_query_heads(row_heads, width, num_kv_heads, head_dim)
    assert slot_mapping_T.shape == (num_tokens,)
    assert k_NPGD.shape == v_NPGD.shape
    if k_NPGD.dtype != FP8:
        assert k_NPGD.dtype == qkv_TE.dtype and k_scale == v_scale == 1.0
    if qkv_TE.is_cuda:
        from lorafleet.kernels.decoder.rope_store_triton import rotate_and_store_triton  # triton is optional on a CPU

        return rotate_and_store_triton(
            qkv,
            cos_T1F,
            sin_T1F,
            q_norm,
            k_norm,
            k_NPGD,
            v_NPGD,
            slot_mapping_T,
            eps,
            k_scale,
            v_scale,
            norms_rotated,
            is_interleaved,
            row_heads,
            norms_values,
        )
    qkv_TE = qkv.added().to(qkv_TE.dtype)
    q, *stored = qkv_TE.view(num_tokens, -1, head_dim).split(
        (width // head_dim - num_stored, *([num_kv_heads] * (num_stored // num_kv_heads))), dim=1
    )
    q = q[:, :: q.shape[1] // num_heads]  # without the gates

    def turned(x_THD: Tensor, norm: NormWeight | None) -> Tensor:
        if norms_rotated:
            x_THD = rotate(x_THD, cos_T1F, sin_T1F, is_interleaved)
        if norm is not None:
            x_THD = rms_norm(x_THD, norm, eps)
        return x_THD if norms_rotated else rotate(x_THD, cos_T1F, sin_T1F, is_interleaved)

    if stored:
        k, v = stored[0], stored[-1]
        if norms_values:
            v = F.rms_norm(v.float(), (head_dim,), None, eps).to(v.dtype)
        store(turned(k, k_norm), k_NPGD, slot_mapping_T, k_scale)
        store(v, v_NPGD, slot_mapping_T, v_scale)
    return turned(q, q_norm)


def num_stored_heads(row_heads: RowHeads, num_kv_heads: int) -> int:
    """Returns the number of heads behind the queries in a row."""
    return {"qkv": 2, "qgkv": 2, "qk": 1, "q": 0}[row_heads] * num_kv_heads


def num_query_heads(row_heads: RowHeads, width: int, num_kv_heads: int, head_dim: int) -> int:
    """Returns the number of queries in a row of `width` numbers."""
    heads, rest = divmod(width, head_dim)
    heads -= num_stored_heads(row_heads, num_kv_heads)
    assert heads > 0 and rest == 0
    if row_heads != "qgkv":
        return heads
    assert heads % 2 == 0
    return heads // 2


def store(x_TGD: Tensor, cache_NPGD: Tensor, slot_mapping_T: Tensor, scale: float) -> None:
    """Writes keys or values to the cache, as rotate_and_store does. It serves any device, without a kernel of ours."""
    rows = cache_NPGD.view(-1, *cache_NPGD.shape[2:])
    if cache_NPGD.dtype == FP8:
        # Use bytes, since torch moves no rows of this dtype on a CPU. Its cast makes NaN of numbers out of range.
        rows = rows.view(torch.uint8)
        x_TGD = (x_TGD.float() / scale).nan_to_num().clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)
    rows.index_copy_(0, slot_mapping_T, x_TGD)


def rotate(x_THD: Tensor, cos_T1F: Tensor, sin_T1F: Tensor, is_interleaved: bool = False) -> Tensor:
    """Rotates each pair (x[i], x[i + F]), the layout of most Hugging Face checkpoints, or (x[2 i], x[2 i + 1]). Numbers
    behind the pairs do not change."""
    pairs = cos_T1F.shape[-1]
    if pairs == 0:
        return x_THD
    rotated, rest = x_THD.split((2 * pairs, x_THD.shape[-1] - 2 * pairs), dim=-1)
    if is_interleaved:
        first, second = rotated[..., ::2], rotated[..., 1::2]
    else:
        first, second = rotated.chunk(2, dim=-1)
    turned = [first * cos_T1F - second * sin_T1F, second * cos_T1F + first * sin_T1F]
    if is_interleaved:
        turned = [torch.stack(turned, dim=-1).flatten(-2)]
    return torch.cat(turned if rest.shape[-1] == 0 else [*turned, rest], dim=-1)
