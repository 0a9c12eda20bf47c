"""The selective state space of Mamba-2: each head has a memory M [K, V] that every token decays and adds to.

    M = exp(-exp(a_log) * dt) * M + k * dt * x;  out = q M + d * x

dt = softplus(the token's own step + dt_bias), clamped to the model's limits. The paper calls k and q B and C. Heads
of a group share them. Everything is computed in float32. On CUDA it is kernels/recurrent/state_space_triton.py.

The twin computes the tokens of a prompt in chunks, by matrix products. Limits apply to every token, however a prompt is
cut. transformers' decodes leave them out.
Source: Mamba-2, arXiv 2405.21060.
"""

# T tokens of the step · N tokens that are computed together · B sequences · H heads · G groups
# K numbers of a key · V numbers of a head · C = H V + 2 G K channels · S state slots

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lorafleet.kernels.recurrent.memory_walk import walk_memories
from lorafleet.kernels.recurrent.recurrent_batch import RecurrentBatch


class HeadSteps(NamedTuple):
    """The inputs and parameters that decide how far each head steps, and what it passes by."""

    dt_TH: Tensor  # any row stride
    a_log_H: Tensor  # float32
    dt_bias_H: Tensor  # float32
    d_H: Tensor  # float32
    dt_limits: tuple[float, float]


def state_space(
    xkq_TC: Tensor, steps: HeadSteps, memory_SHKV: Tensor, num_groups: int, batch: RecurrentBatch
) -> Tensor:
    """Returns [T, H, V] in xkq's dtype, and advances the memories in place. Those behind tokens of batch.kept_T are
    written too.

    Rows of xkq are contiguous: x of all heads, then k of all groups, then q of all groups. memory is float32.
    """
    if xkq_TC.is_cuda:
        from lorafleet.kernels.recurrent.state_space_triton import state_space_triton  # triton is optional on a CPU

        return state_space_triton(xkq_TC, steps, memory_SHKV, num_groups, batch)
    return state_space_torch(xkq_TC, steps, memory_SHKV, num_groups, batch)


def state_space_torch(
    xkq_TC: Tensor, steps: HeadSteps, memory_SHKV: Tensor, num_groups: int, batch: RecurrentBatch
) -> Tensor:
    _, heads, _, v_dim = memory_SHKV.shape

    def tokens_of(rows: slice | Tensor) -> _Tokens:
        return _Tokens.of(xkq_TC, steps, memory_SHKV, num_groups, rows)

    def one_token(rows_N: Tensor, memory_NHKV: Tensor) -> Tensor:
        tokens = tokens_of(rows_N)
        return _one_token(tokens, memory_NHKV) + tokens.passed(steps)

    def one_chunk(rows: slice, memory_HKV: Tensor) -> tuple[Tensor, Tensor]:
        chunk = tokens_of(rows)
        out_HNV, memory_HKV = _one_chunk(chunk, memory_HKV)
        return out_HNV.transpose(0, 1) + chunk.passed(steps), memory_HKV

    out_THV = xkq_TC.new_empty(len(xkq_TC), heads, v_dim)
    return walk_memories(out_THV, memory_SHKV, batch, one_token, one_chunk)


class _Tokens(NamedTuple):
    """The numbers of some tokens by head, in float32."""

    x_NHV: Tensor
    k_NHK: Tensor
    q_NHK: Tensor
    dt_NH: Tensor
    decay_NH: Tensor  # the logarithm of what remains of the memory

    @classmethod
    def of(
        cls, xkq_TC: Tensor, steps: HeadSteps, memory_SHKV: Tensor, num_groups: int, rows: slice | Tensor
    ) -> _Tokens:
        _, heads, k_dim, v_dim = memory_SHKV.shape
        keys = num_groups * k_dim
        x_NC, k_NC, q_NC = xkq_TC[rows].float().split((heads * v_dim, keys, keys), dim=1)

        def by_head(part_NC: Tensor) -> Tensor:
            return part_NC.reshape(-1, num_groups, k_dim).repeat_interleave(heads // num_groups, dim=1)

        dt_NH = F.softplus(steps.dt_TH[rows].float() + steps.dt_bias_H).clamp(*steps.dt_limits)
        return cls(x_NC.reshape(-1, heads, v_dim), by_head(k_NC), by_head(q_NC), dt_NH, -steps.a_log_H.exp() * dt_NH)

    def passed(self, steps: HeadSteps) -> Tensor:
        """Returns the part of the result that does not pass the memory, [N, H, V]."""
        return self.x_NHV * steps.d_H[:, None]


def _one_token(token: _Tokens, memory_NHKV: Tensor) -> Tensor:
    """Returns [N, H, V] for one token of each of N sequences, and advances their memories in place."""
    memory_NHKV *= token.decay_NH.exp()[..., None, None]
    memory_NHKV += token.k_NHK.unsqueeze(3) * (token.dt_NH[..., None] * token.x_NHV).unsqueeze(2)
    return torch.einsum("nhk,nhkv->nhv", token.q_NHK, memory_NHKV)


def _one_chunk(chunk: _Tokens, memory_HKV: Tensor) -> tuple[Tensor, Tensor]:
    """Returns [H, N, V] for N tokens of one sequence, and the memory behind them."""
    q_HNK, k_HNK = chunk.q_NHK.transpose(0, 1), chunk.k_NHK.transpose(0, 1)
    added_HNV = (chunk.x_NHV * chunk.dt_NH[..., None]).transpose(0, 1)
    total_HN = chunk.decay_NH.T.cumsum(dim=1)  # decay from the chunk's beginning up to and with each token
    # Decay of what token j added until token i. It grows without bound above the diagonal, which does not count.
    between_HNN = (total_HN.unsqueeze(2) - total_HN.unsqueeze(1)).tril().exp().tril()
    out_HNV = (q_HNK * total_HN.exp().unsqueeze(2)) @ memory_HKV
    out_HNV = out_HNV + ((q_HNK @ k_HNK.transpose(1, 2)) * between_HNN) @ added_HNV
    left_HN1 = (total_HN[:, -1:] - total_HN).exp().unsqueeze(2)
    memory_HKV = memory_HKV * total_HN[:, -1].exp()[:, None, None] + (k_HNK * left_HN1).transpose(1, 2) @ added_HNV
    return out_HNV, memory_HKV
