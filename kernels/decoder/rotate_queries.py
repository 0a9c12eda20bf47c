"""The rotation of latent attention's queries, of which only the last numbers of a head are rotated. On CUDA it is one
launch of kernels/decoder/rotate_queries_triton.py instead of ten operators of torch."""

# T tokens · H query heads · R = 2 F rotated numbers of a head

from __future__ import annotations

from torch import Tensor

from lorafleet.kernels.decoder.rope_store import rotate


def rotate_queries(q_THR: Tensor, cos_T1F: Tensor, sin_T1F: Tensor, is_interleaved: bool, out_THR: Tensor) -> None:
    """Writes the rotated numbers to out. Both may be parts of wider tensors, with contiguous last dimensions.

    is_interleaved is as in kernels/decoder/rope_store.py.
    """
    num_tokens, _, width = q_THR.shape
    assert out_THR.shape == q_THR.shape and out_THR.dtype == q_THR.dtype
    assert cos_T1F.shape == sin_T1F.shape == (num_tokens, 1, width // 2)
    if q_THR.is_cuda:
        from lorafleet.kernels.decoder.rotate_queries_triton import rotate_queries_triton  # optional on a CPU

        rotate_queries_triton(q_THR, cos_T1F, sin_T1F, is_interleaved, out_THR)
        return
    out_THR.copy_(rotate(q_THR, cos_T1F, sin_T1F, is_interleaved))
