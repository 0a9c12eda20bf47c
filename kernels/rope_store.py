"""Between the GEMM of q, k and v and attention: per-head norm, rotation, the write of k and v to the paged cache.

On CUDA all of it is one launch of kernels/rope_store_triton.py.
"""

# T tokens · E all heads of q, k and v in one row · H query heads · G KV heads · D head size · F = D / 2
# N KV blocks · P block size

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rotate_and_store(
    qkv_TE: Tensor,
    cos_T1F: Tensor,
    sin_T1F: Tensor,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    k_NPGD: Tensor,
    v_NPGD: Tensor,
    slot_mapping_T: Tensor,
    eps: float,
) -> Tensor:
    """Returns the rotated queries [T, H, D]; writes each token's key and value to its place in the cache.

    q_norm and k_norm are both weights of RMS norms over D, or both None. slot_mapping_T is int64, block * P + offset;
    on CUDA a negative one (the padding of a CUDA graph) stores nothing.
    """
    num_tokens, width = qkv_TE.shape
    num_kv_heads, head_dim = k_NPGD.shape[2:]
    num_heads = width // head_dim - 2 * num_kv_heads
    assert num_heads > 0 and width == (num_heads + 2 * num_kv_heads) * head_dim
    assert slot_mapping_T.shape == (num_tokens,)
    assert k_NPGD.shape == v_NPGD.shape
    if qkv_TE.is_cuda:
        from lorafleet.kernels.rope_store_triton import rotate_and_store_triton  # triton is optional on a CPU

        return rotate_and_store_triton(
            qkv_TE, cos_T1F, sin_T1F, q_norm_D, k_norm_D, k_NPGD, v_NPGD, slot_mapping_T, eps
        )
    qk, v = qkv_TE.view(num_tokens, -1, head_dim).split((num_heads + num_kv_heads, num_kv_heads), dim=1)
    if q_norm_D is not None and k_norm_D is not None:
        q, k = qk.split((num_heads, num_kv_heads), dim=1)
        size = q_norm_D.shape
        qk = torch.cat((F.rms_norm(q, size, q_norm_D, eps), F.rms_norm(k, size, k_norm_D, eps)), dim=1)
    rotated = rotate(qk, cos_T1F, sin_T1F)
    q, k = rotated[:, :num_heads], rotated[:, num_heads:]
    k_NPGD.view(-1, num_kv_heads, head_dim).index_copy_(0, slot_mapping_T, k)
    v_NPGD.view(-1, num_kv_heads, head_dim).index_copy_(0, slot_mapping_T, v)
    return q


def rotate(x_THD: Tensor, cos_T1F: Tensor, sin_T1F: Tensor) -> Tensor:
    """Rotates each pair (x[i], x[i + D/2]), the layout of Hugging Face checkpoints."""
    first, second = x_THD.chunk(2, dim=-1)
    return torch.cat((first * cos_T1F - second * sin_T1F, second * cos_T1F + first * sin_T1F), dim=-1)
