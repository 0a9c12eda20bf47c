"""The entry points of a mixture of experts: the router's choice, and the chosen experts' MLPs with their weighted sum.

A pair is a token with one of its experts: pair p is token p // K with its expert p % K. On CUDA the launches depend on
the number of tokens alone, not on the choice, so that a captured graph serves any choice (kernels/moe/moe_triton.py).
"""

# T tokens · E experts · K experts a token · N = T * K pairs · D hidden size · I intermediate size · O out
# U rows of gate_up: 2I, or I without a gate

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lorafleet.kernels.moe.expert_activation import ExpertActivation
from lorafleet.kernels.moe.expert_codes import ExpertMatrix, is_tiled
from lorafleet.kernels.moe.expert_lora import ExpertOutput, StepExperts
from lorafleet.kernels.moe.moe_torch import PairsByExpert, SharedOutput, route_torch
from lorafleet.kernels.moe.routing_rule import RoutingRule


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts that the router chose for each token."""

    expert_TK: Tensor  # int32: each token's experts, all different
    weight_TK: Tensor  # float32


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """The base's weights of all experts of a layer, and how they are used."""

    gate_up_EUD: (
        ExpertMatrix  # For each expert the rows of gate and then those of up, or those of up if there is no gate.
    )
    down_EDI: ExpertMatrix
    activation: ExpertActivation = "silu"
    gate_up_bias_EU: Tensor | None = None
    down_bias_ED: Tensor | None = None
    scales_input: bool = False  # A token's weight multiplies its expert's input, and not the output.

    @property
    def are_tiled(self) -> bool:
        """Whether the CUDA kernels for codes of four bits read all weights."""
        return is_tiled(self.gate_up_EUD) and is_tiled(self.down_EDI)


def route(
    logits_TE: Tensor,
    rule: RoutingRule,
    correction_E: Tensor | None = None,
    scale_E: Tensor | None = None,
    out_TK: Tensor | None = None,
) -> Routing:
    """Chooses each token's experts as `rule` says.

    correction_E (float32) is added to the scores for the choice alone, and not to the weights. scale_E (float32)
    multiplies the chosen experts' weights. out_TK is the int32 memory for the choice; None makes new memory.
    """
    if logits_TE.is_cuda:
        from lorafleet.kernels.moe.moe_route_triton import route_triton  # triton is optional on a CPU

        return Routing(*route_triton(logits_TE, rule, correction_E, scale_E, out_TK))
    routing = Routing(*route_torch(logits_TE, rule, correction_E, scale_E))
    return routing if out_TK is None else Routing(out_TK.copy_(routing.expert_TK), routing.weight_TK)


def experts_mlp(
    x_TD: Tensor,
    routing: Routing,
    matrices: ExpertMatrices,
    adapters: tuple[StepExperts, StepExperts] | None = None,
    shared: SharedOutput | None = None,
) -> Tensor:
    """Returns for each token the weighted sum of its experts' MLPs, plus the shared expert's output, [T, D].

    `adapters` are those on gate_up and on down. It is None if no token has an adapter on the experts.
    """
    to_gate_up, to_down = (None, None) if adapters is None else adapters
    pairs = _grouped(routing.expert_TK, matrices.down_EDI.shape[0], matrices.are_tiled, to_gate_up)
    x, left_TK = x_TD, None if matrices.scales_input else routing.weight_TK
    if matrices.scales_input:
        x = (x_TD.unsqueeze(1) * routing.weight_TK.to(x_TD.dtype).unsqueeze(-1)).flatten(0, 1)
    gate_up = pairs.linear(x, matrices.gate_up_EUD, to_gate_up)
    inner_NI = pairs.activate(gate_up, matrices.activation, matrices.gate_up_bias_EU)
    down = pairs.linear(inner_NI, matrices.down_EDI, to_down)
    return pairs.combine(down, left_TK, matrices.down_bias_ED, shared)


class _Pairs(Protocol):
    """All pairs of a step, grouped by expert."""

    def linear(self, x: Tensor, w_EOD: ExpertMatrix, adapters: StepExperts | None) -> ExpertOutput:
        """Returns for each pair x times its expert's w, and its adapter's addition. x is [T, D] or [N, D]."""

    def activate(self, gate_up: ExpertOutput, activation: ExpertActivation, bias_EU: Tensor | None) -> Tensor:
        """Returns the activation of gate_up with the experts' biases, [N, I]."""

    def combine(
        self, down: ExpertOutput, weight_TK: Tensor | None, bias_ED: Tensor | None, shared: SharedOutput | None
    ) -> Tensor:
        """Returns the weighted sum of each token's pairs with the experts' biases, [T, D]. Weights of None are 1."""


def _grouped(expert_TK: Tensor, num_experts: int, are_tiled: bool, adapters: StepExperts | None) -> _Pairs:
    if expert_TK.is_cuda:
        from lorafleet.kernels.moe.moe_triton import PairTiles

        return PairTiles.of(expert_TK, num_experts, are_tiled, adapters)
    return PairsByExpert.of(expert_TK)
