"""A mixture of experts in plain torch: the CPU's serving path and the Triton kernels' reference."""

# T tokens · E experts · K experts a token · N = T * K pairs · D in · O out · G groups of X experts

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.moe.expert_activation import ExpertActivation, activate_experts
from lorafleet.kernels.moe.expert_codes import ExpertMatrix
from lorafleet.kernels.moe.expert_lora import ExpertOutput, StepExperts
from lorafleet.kernels.moe.routing_rule import ExpertGroups, RoutingRule

SMALLEST_SUM = 1e-20  # a sum of weights below it counts as this much, so that zeros stay zeros


def route_torch(
    logits_TE: Tensor, rule: RoutingRule, correction_E: Tensor | None, scale_E: Tensor | None
) -> tuple[Tensor, Tensor]:
    logits_TE = logits_TE.float()
    if rule.scores == "sparsemixer":
        return _sparsemixer(logits_TE, rule)
    score_TE = logits_TE.softmax(-1) if rule.scores == "softmax" else logits_TE.sigmoid()
    choice_TE = score_TE
    if correction_E is not None:
        choice_TE = score_TE + correction_E
    elif rule.scores == "sigmoid" and rule.groups is None:
        choice_TE = logits_TE  # which still differ where their sigmoids are rounded to 1
    if rule.groups is not None:
        choice_TE = _best_groups(choice_TE, rule.groups)
    expert_TK = choice_TE.topk(rule.per_token, dim=-1).indices
    weight_TK = score_TE.gather(1, expert_TK)
    if rule.sums_to_one:
        weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True).clamp(min=SMALLEST_SUM)
    if rule.scaling != 1.0:
        weight_TK = weight_TK * rule.scaling
    if scale_E is not None:
        weight_TK = weight_TK * scale_E[expert_TK]
    return expert_TK.to(torch.int32), weight_TK


def _sparsemixer(logits_TE: Tensor, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    left_TE, experts, weights = logits_TE, [], []
    for _ in range(rule.per_token):
        best_T1, expert_T1 = left_TE.max(-1, keepdim=True)
        is_far_TE = (best_T1 - logits_TE) / logits_TE.abs().maximum(best_T1) > rule.nearness
        near_TE = left_TE.masked_fill(is_far_TE, float("-inf"))
        experts.append(expert_T1)
        weights.append(rule.scaling / (near_TE - best_T1).exp().sum(-1, keepdim=True))
        left_TE = left_TE.scatter(1, expert_T1, float("-inf"))
    return torch.cat(experts, dim=1).to(torch.int32), torch.cat(weights, dim=1)


def _best_groups(choice_TE: Tensor, groups: ExpertGroups) -> Tensor:
    """Returns the values of the experts in each token's best groups, and -inf for the others."""
    choice_TGX = choice_TE.view(len(choice_TE), groups.count, -1)
    best_of_group = choice_TGX.topk(2 if groups.ranked_by == "top_two" else 1, dim=-1).values.sum(-1)
    kept_TG = torch.zeros_like(best_of_group, dtype=torch.bool)
    kept_TG.scatter_(1, best_of_group.topk(groups.per_token, dim=-1).indices, True)
    return choice_TGX.masked_fill(~kept_TG.unsqueeze(-1), float("-inf")).flatten(1)


class SharedOutput(NamedTuple):
    """The output of the shared expert, which is added to that of the routed ones."""

    y_TD: Tensor  # contiguous
    gate_T1: Tensor | None = None  # its sigmoid multiplies y; None means 1


@dataclass(frozen=True, slots=True)
class PairsByExpert:
    """All pairs of a step, grouped by the experts that were chosen."""

    expert_TK: Tensor
    groups: list[tuple[int, Tensor]]  # for each chosen expert, its number and its pairs (int64)

    @classmethod
    def of(cls, expert_TK: Tensor) -> PairsByExpert:
        expert_N = expert_TK.flatten()
        chosen, counts = expert_N.unique(return_counts=True)
        pairs = expert_N.argsort(stable=True).split(counts.tolist())
        return cls(expert_TK, list(zip(chosen.tolist(), pairs, strict=True)))

    def linear(self, x: Tensor, w_EOD: ExpertMatrix, adapters: StepExperts | None = None) -> ExpertOutput:
        num_pairs = self.expert_TK.numel()
        out_NO = x.new_empty(num_pairs, w_EOD.shape[1])
        pairs_a_row = num_pairs // max(len(x), 1)
        for expert, pairs in self.groups:
            out_NO[pairs] = F.linear(x[pairs // pairs_a_row], w_EOD[expert])
            if adapters is not None:
                _add_adapters(out_NO, x, expert, pairs, pairs_a_row, adapters)
        return ExpertOutput(out_NO)

    def activate(self, gate_up: ExpertOutput, activation: ExpertActivation, bias_EU: Tensor | None) -> Tensor:
        return activate_experts(LinearOutput(gate_up.y_NO), activation, self.expert_TK.view(-1), bias_EU)

    def combine(
        self, down: ExpertOutput, weight_TK: Tensor | None, bias_ED: Tensor | None, shared: SharedOutput | None
    ) -> Tensor:
        return combine_torch(down.y_NO, self.expert_TK, weight_TK, bias_ED, shared)


def _add_adapters(
    out_NO: Tensor, x: Tensor, expert: int, pairs: Tensor, pairs_a_row: int, adapters: StepExperts
) -> None:
    """Adds the adapters to one expert's pairs, with a pair of GEMMs for each adapter among them."""
    pairs_a_token = len(out_NO) // len(adapters.slot_T)
    slot_of_pair = adapters.slot_T[pairs // pairs_a_token]
    for slot in slot_of_pair.unique().tolist():
        weights = adapters.slots[slot] if slot >= 0 else None
        if weights is None:
            continue
        own = pairs[slot_of_pair == slot]
        p = x[own // pairs_a_row].to(weights.a_ECD.dtype) @ weights.a_ECD[expert].T
        p_NGR = p.view(len(own), weights.groups, weights.rank) * weights.scale_EG[expert].unsqueeze(1).to(p.dtype)
        b_GOR = weights.b_EOR[expert].view(weights.groups, -1, weights.rank)
        delta = torch.einsum("ngr,gor->ngo", p_NGR, b_GOR).reshape(len(own), -1)
        out_NO[own] += delta.to(out_NO.dtype)


def combine_torch(
    y_ND: Tensor, expert_TK: Tensor, weight_TK: Tensor | None, bias_ED: Tensor | None, shared: SharedOutput | None
) -> Tensor:
    """Returns the weighted sum of each token's pairs, [T, D], in y's dtype."""
    y_TKD = y_ND.view(*expert_TK.shape, -1).float()
    if bias_ED is not None:
        y_TKD = y_TKD + bias_ED[expert_TK.long()].float()
    if weight_TK is not None:
        y_TKD = y_TKD * weight_TK.unsqueeze(-1)
    out_TD = y_TKD.sum(1)
    if shared is not None:
        shared_TD = shared.y_TD.float()
        out_TD += shared_TD if shared.gate_T1 is None else shared_TD * shared.gate_T1.float().sigmoid()
    return out_TD.to(y_ND.dtype)
