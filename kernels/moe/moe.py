"""The entry points of a mixture of experts: the router's choice, and the chosen experts' MLPs with their weighted sum.

A pair is a token with one of its experts: pair p is token p // K with its expert p % K. On CUDA the launches depend on
the number of tokens alone, not on the choice, so that a captured graph serves any choice (kernels/moe/moe_triton.py).
"""

# T tokens · E experts · K experts a token · N = T * K pairs · D hidden size · I intermediate size · O out

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lorafleet.kernels.decoder.gated_mul import gated_mul
from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.moe.expert_lora import StepExperts
from lorafleet.kernels.moe.moe_torch import PairsByExpert, combine_torch, route_torch


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts that the router chose for each token."""

    expert_TK: Tensor  # int32: each token's experts, all different
    weight_TK: Tensor  # float32


def route(logits_TE: Tensor, per_token: int, sums_to_one: bool) -> Routing:
    """Chooses the per_token experts with the largest logits.

    Their weights are their probabilities among all experts, divided by their sum if sums_to_one.
    """
    if logits_TE.is_cuda:
        from lorafleet.kernels.moe.moe_route_triton import route_triton  # triton is optional on a CPU

        return Routing(*route_triton(logits_TE, per_token, sums_to_one))
    return Routing(*route_torch(logits_TE, per_token, sums_to_one))


def experts_mlp(
    x_TD: Tensor,
    routing: Routing,
    gate_up_E2ID: Tensor,
    down_EDI: Tensor,
    adapters: tuple[StepExperts, StepExperts] | None = None,
) -> Tensor:
    """Returns for each token the weighted sum of its experts' down(silu(gate x) * up x), [T, D].

    `adapters` are those on gate_up and on down. It is None if no token has an adapter on the experts.
    """
    to_gate_up, to_down = (None, None) if adapters is None else adapters
    pairs = _grouped(routing.expert_TK, len(down_EDI), adapters is not None)
    gate_up = pairs.linear(x_TD, gate_up_E2ID, to_gate_up)
    down = pairs.linear(gated_mul(gate_up), down_EDI, to_down)
    if x_TD.is_cuda:
        from lorafleet.kernels.moe.moe_route_triton import combine_triton

        return combine_triton(down, routing.weight_TK)
    return combine_torch(down.y_TO, routing.weight_TK)


class _Pairs(Protocol):
    """All pairs of a step, grouped by expert."""

    def linear(self, x: Tensor, w_EOD: Tensor, adapters: StepExperts | None) -> LinearOutput:
        """Returns for each pair x times its expert's w, and its adapter's addition, [N, O]. x is [T, D] or [N, D]."""


def _grouped(expert_TK: Tensor, num_experts: int, with_adapters: bool) -> _Pairs:
    if expert_TK.is_cuda:
        from lorafleet.kernels.moe.moe_triton import PairTiles

        return PairTiles.of(expert_TK, num_experts, with_adapters)
    return PairsByExpert.of(expert_TK)
