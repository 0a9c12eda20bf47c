"""Gates of attention's results: each head's result is multiplied by the sigmoid of its own gate, as in Qwen3-Next.

The gates are outputs of the linear that computes queries, keys and values. On CUDA it is one launch of
kernels/decoder/head_gate_triton.py.
"""

# T tokens · E all heads of q with their gates, k and v in one row · H query heads · P head size

from __future__ import annotations

from torch import Tensor

from lorafleet.kernels.lora.linear_output import LinearOutput


def head_gate(x_THP: Tensor, qgkv: LinearOutput) -> Tensor:
    """Returns x * sigmoid(gate) [T, H, P] in x's dtype. x is contiguous.

    A row of qgkv begins with the query of the first head, then its gate, then the query of the second head, and so on.
    """
    if x_THP.is_cuda:
        from lorafleet.kernels.decoder.head_gate_triton import head_gate_triton  # triton is optional on a CPU

        return head_gate_triton(x_THP, qgkv)
    num_tokens, heads, head_dim = x_THP.shape
    rows_THP = qgkv.added()[:, : 2 * heads * head_dim].view(num_tokens, 2 * heads, head_dim)
    return (x_THP.float() * rows_THP[:, 1::2].float().sigmoid()).to(x_THP.dtype)
