"""A gated delta net between its linears, for steps in which few sequences have one token each: the convolution, the
delta rule and the gated norm, with the linear that projects to b and a.

Each is a launch of its own in steps with prompts (kernels/recurrent/causal_conv.py, delta_rule.py, gated_norm.py). With
few tokens they take as long as their launches. On CUDA all are one launch of kernels/recurrent/delta_step_triton.py.
"""

# T tokens, each of another sequence · D hidden size · C channels: queries, keys, values · J earlier tokens that the
# convolution reads · H value heads · G key heads · K numbers of a key · V numbers of a value · S state slots
# N outputs of a linear

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lorafleet.kernels.extras.affine import apply_affine
from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.recurrent.causal_conv import causal_conv_torch
from lorafleet.kernels.recurrent.delta_rule import HeadGates, delta_rule_torch
from lorafleet.kernels.recurrent.gated_norm import gated_norm_torch
from lorafleet.kernels.recurrent.recurrent_batch import RecurrentBatch

MOST_TOKENS = 16


class HeadColumns(NamedTuple):
    """The columns of a row that belong to a head: those of key head g begin at first + g * group. The value heads of a
    key head follow each other."""

    first: int
    group: int


@dataclass(frozen=True, slots=True)
class DeltaColumns:
    """The columns of all parts that the layer reads. Those of b and a are outputs of the second input linear, and the
    others are outputs of the first."""

    q: HeadColumns
    k: HeadColumns
    v: HeadColumns
    gate: HeadColumns
    b: HeadColumns
    a: HeadColumns


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """The weights that a layer's step reads, and how it reads them."""

    second_ND: Tensor  # the weight of the second input linear
    columns: DeltaColumns
    num_k_heads: int
    conv_CK: Tensor
    a_log_H: Tensor  # float32
    dt_bias_H: Tensor  # float32
    beta_scale: float
    norm_V: Tensor
    eps: float
    arrived_TG: Tensor  # int32 [MOST_TOKENS, G], zero before and after: value heads that have read their key head
    early: bool = False  # The launch starts before the kernel ahead has ended (programmatic dependent launch).


def delta_step(
    first: LinearOutput,
    x_TD: Tensor,
    weights: DeltaWeights,
    conv_SCJ: Tensor,
    memory_SHKV: Tensor,
    batch: RecurrentBatch,
) -> Tensor:
    """Returns the gated norm's output [T, H, V], and advances the states in place. T is at most MOST_TOKENS.

    x is the layer's input, and `first` the first linear's output, which may be in sums. b and a are rounded as a linear
    alone rounds them.
    """
    assert all(count == 1 for count in batch.query_lens) and len(batch.query_lens) <= MOST_TOKENS
    if x_TD.is_cuda:
        from lorafleet.kernels.recurrent.delta_step_triton import delta_step_triton  # triton is optional on a CPU

        return delta_step_triton(first, x_TD, weights, conv_SCJ, memory_SHKV, batch)
    return delta_step_torch(first, x_TD, weights, conv_SCJ, memory_SHKV, batch)


def delta_step_torch(
    first: LinearOutput,
    x_TD: Tensor,
    weights: DeltaWeights,
    conv_SCJ: Tensor,
    memory_SHKV: Tensor,
    batch: RecurrentBatch,
) -> Tensor:
    first_TN, second_TN = apply_affine(first), F.linear(x_TD, weights.second_ND)
    columns, groups = weights.columns, weights.num_k_heads
    _, num_heads, k_dim, v_dim = memory_SHKV.shape
    ratio = num_heads // groups

    def taken(row_TN: Tensor, place: HeadColumns, size: int) -> Tensor:
        """Returns `size` numbers of each key head, side by side."""
        starts = [place.first + g * place.group for g in range(groups)]
        return row_TN[:, [start + i for start in starts for i in range(size)]]

    q_TC, k_TC = taken(first_TN, columns.q, k_dim), taken(first_TN, columns.k, k_dim)
    v_TC = taken(first_TN, columns.v, ratio * v_dim)
    mixed_TC = causal_conv_torch(torch.cat((q_TC, k_TC, v_TC), dim=1), weights.conv_CK, conv_SCJ, batch)
    b_TH, a_TH = taken(second_TN, columns.b, ratio), taken(second_TN, columns.a, ratio)
    gates = HeadGates(b_TH, a_TH, weights.a_log_H, weights.dt_bias_H, weights.beta_scale)
    out_THV = delta_rule_torch(mixed_TC, gates, memory_SHKV, groups, batch)
    gate_THV = taken(first_TN, columns.gate, ratio * v_dim).view_as(out_THV)
    return gated_norm_torch(out_THV, gate_THV, weights.norm_V, weights.eps)
