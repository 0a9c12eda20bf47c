"""The gated delta rule: each head has a memory M [K, V] that maps keys to values, and every token corrects it.

    M = exp(decay) * M;  M = M + k * beta * (v - k M);  out = q M

q and k have length 1, and q is then divided by sqrt(K). decay = -exp(a_log) * softplus(a + dt_bias), and
beta = beta_scale * sigmoid(b). Everything is computed in float32. On CUDA it is
kernels/recurrent/delta_rule_triton.py and delta_chunks_triton.py.

The twin computes the tokens of a prompt in chunks, by matrix products. Within a chunk, the corrections u of all
tokens satisfy a triangular system: a token's correction depends on those of the tokens before it.
Source: Gated DeltaNet, arXiv 2412.06464.
"""

# T tokens of the step · N tokens that are computed together · B sequences · H value heads · G key heads
# K numbers of a key · V numbers of a value · C = 2 G K + H V channels · S state slots

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lorafleet.kernels.recurrent.memory_walk import walk_memories
from lorafleet.kernels.recurrent.recurrent_batch import RecurrentBatch

NORM_EPS = 1e-6  # added to the squared length of q and of k


class HeadGates(NamedTuple):
    """The inputs and parameters that decide how much of its memory each head forgets and corrects."""

    b_TH: Tensor
    a_TH: Tensor
    a_log_H: Tensor  # float32
    dt_bias_H: Tensor  # float32
    beta_scale: float = 1.0  # With 2, a correction may overshoot, so that a memory can change its sign.

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.b_TH, self.a_TH, self.a_log_H, self.dt_bias_H


def gated_delta_rule(
    qkv_TC: Tensor, gates: HeadGates, memory_SHKV: Tensor, num_k_heads: int, batch: RecurrentBatch
) -> Tensor:
    """Returns [T, H, V] in qkv's dtype, and advances the memories in place. Those behind tokens of batch.kept_T are
    written too.

    Rows of qkv are contiguous: all queries, then all keys, then all values. memory is float32.
    """
    if qkv_TC.is_cuda:
        from lorafleet.kernels.recurrent.delta_rule_triton import delta_rule_triton  # triton is optional on a CPU

        return delta_rule_triton(qkv_TC, gates, memory_SHKV, num_k_heads, batch)
    return delta_rule_torch(qkv_TC, gates, memory_SHKV, num_k_heads, batch)


def delta_rule_torch(
    qkv_TC: Tensor, gates: HeadGates, memory_SHKV: Tensor, num_k_heads: int, batch: RecurrentBatch
) -> Tensor:
    _, heads, _, v_dim = memory_SHKV.shape

    def heads_of(rows: slice | Tensor) -> _Heads:
        return _Heads.of(qkv_TC, gates, memory_SHKV, num_k_heads, rows)

    def one_chunk(rows: slice, memory_HKV: Tensor) -> tuple[Tensor, Tensor]:
        out_HNV, memory_HKV = _one_chunk(heads_of(rows), memory_HKV)
        return out_HNV.transpose(0, 1), memory_HKV

    return walk_memories(
        qkv_TC.new_empty(len(qkv_TC), heads, v_dim),
        memory_SHKV,
        batch,
        lambda rows_N, memory_NHKV: _one_token(heads_of(rows_N), memory_NHKV),
        one_chunk,
    )


class _Heads(NamedTuple):
    """The queries, keys, values, decays and corrections of some tokens by value head, in float32."""

    q_NHK: Tensor
    k_NHK: Tensor
    v_NHV: Tensor
    decay_NH: Tensor
    beta_NH: Tensor

    @classmethod
    def of(
        cls, qkv_TC: Tensor, gates: HeadGates, memory_SHKV: Tensor, num_k_heads: int, rows: slice | Tensor
    ) -> _Heads:
        _, heads, k_dim, v_dim = memory_SHKV.shape
        keys = num_k_heads * k_dim
        q_NC, k_NC, v_NC = qkv_TC[rows].float().split((keys, keys, heads * v_dim), dim=1)

        def by_value_head(x_NC: Tensor) -> Tensor:
            x_NGK = x_NC.reshape(-1, num_k_heads, k_dim)
            x_NGK = x_NGK * torch.rsqrt(x_NGK.square().sum(dim=-1, keepdim=True) + NORM_EPS)
            return x_NGK.repeat_interleave(heads // num_k_heads, dim=1)

        return cls(
            by_value_head(q_NC) * k_dim**-0.5,
            by_value_head(k_NC),
            v_NC.reshape(-1, heads, v_dim),
            -gates.a_log_H.exp() * F.softplus(gates.a_TH[rows].float() + gates.dt_bias_H),
            gates.b_TH[rows].float().sigmoid() * gates.beta_scale,
        )


def _one_token(token: _Heads, memory_NHKV: Tensor) -> Tensor:
    """Returns [N, H, V] for one token of each of N sequences, and advances their memories in place."""
    memory_NHKV *= token.decay_NH.exp()[..., None, None]
    known_NHV = torch.einsum("nhk,nhkv->nhv", token.k_NHK, memory_NHKV)
    correction_NHV = (token.v_NHV - known_NHV) * token.beta_NH[..., None]
    memory_NHKV += token.k_NHK.unsqueeze(3) * correction_NHV.unsqueeze(2)
    return torch.einsum("nhk,nhkv->nhv", token.q_NHK, memory_NHKV)


def _one_chunk(chunk: _Heads, memory_HKV: Tensor) -> tuple[Tensor, Tensor]:
    """Returns [H, N, V] for N tokens of one sequence, and the memory behind them."""
    q_HNK, k_HNK, v_HNV = (part.transpose(0, 1) for part in (chunk.q_NHK, chunk.k_NHK, chunk.v_NHV))
    total_HN = chunk.decay_NH.T.cumsum(dim=1)  # decay from the chunk's beginning up to and with each token
    beta_HN1 = chunk.beta_NH.T.unsqueeze(2)
    # Decay of the correction of token j until token i. It grows without bound above the diagonal, which does not count.
    between_HNN = (total_HN.unsqueeze(2) - total_HN.unsqueeze(1)).tril().exp().tril()
    known_HNV = (k_HNK * total_HN.exp().unsqueeze(2)) @ memory_HKV
    system_HNN = beta_HN1 * (k_HNK @ k_HNK.transpose(1, 2)) * between_HNN
    u_HNV = torch.linalg.solve_triangular(system_HNN, beta_HN1 * (v_HNV - known_HNV), upper=False, unitriangular=True)
    out_HNV = (q_HNK * total_HN.exp().unsqueeze(2)) @ memory_HKV
    out_HNV = out_HNV + ((q_HNK @ k_HNK.transpose(1, 2)) * between_HNN) @ u_HNV
    left_HN1 = (total_HN[:, -1:] - total_HN).exp().unsqueeze(2)
    memory_HKV = memory_HKV * total_HN[:, -1].exp()[:, None, None] + (k_HNK * left_HN1).transpose(1, 2) @ u_HNV
    return out_HNV, memory_HKV
