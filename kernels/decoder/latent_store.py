"""The write of latent attention's keys to the paged cache: the norm of the latent vector, and the rotation of the key
that all heads share. On CUDA it is one launch of kernels/decoder/latent_store_triton.py."""

# T tokens · E a latent vector and the shared key in one row · C latent size · F rotated pairs
# N KV blocks · P block size · G one KV head

from __future__ import annotations

import torch
from torch import Tensor

from lorafleet.kernels.decoder.rms_norm import NormWeight, rms_norm
from lorafleet.kernels.decoder.rope_store import rotate, store
from lorafleet.kernels.quant.fp8 import FP8


def store_latent(
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
    """Writes [norm(x[:C]), rotated x[C:]] of each token to the cache, where E = C + 2 F.

    x may be columns of a wider matrix. The norm is an RMS norm over C. The cache has x's dtype, or is float8_e4m3fn
    and holds the numbers divided by `scale`, as in kernels/decoder/rope_store.py. slot_mapping_T and is_interleaved are
    as in rotate_and_store.
    """
    num_tokens, width = x_TE.shape
    latent_dim = width - 2 * cos_T1F.shape[-1]
    assert cache_NPGE.shape[2:] == (1, width) and latent_dim > 0
    assert slot_mapping_T.shape == (num_tokens,)
    assert cos_T1F.shape == sin_T1F.shape == (num_tokens, 1, (width - latent_dim) // 2)
    assert not norm.is_centered and norm.bias_D is None
    assert cache_NPGE.dtype == FP8 or (cache_NPGE.dtype == x_TE.dtype and scale == 1.0)
    if x_TE.is_cuda:
        from lorafleet.kernels.decoder.latent_store_triton import store_latent_triton  # triton is optional on a CPU

        store_latent_triton(
            x_TE, cos_T1F, sin_T1F, norm, eps, cache_NPGE, slot_mapping_T, scale, is_interleaved=is_interleaved
        )
        return
    latent_TC = rms_norm(x_TE[:, :latent_dim], norm, eps)
    key_T1K = rotate(x_TE[:, None, latent_dim:], cos_T1F, sin_T1F, is_interleaved)
    store(torch.cat((latent_TC.unsqueeze(1), key_T1K), dim=2), cache_NPGE, slot_mapping_T, scale)
