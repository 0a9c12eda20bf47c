"""A mixture of experts in plain torch: the CPU's serving path and the Triton kernels' reference."""

# T tokens · E experts · K experts a token · N = T * K pairs · D in · O out

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.moe.expert_lora import StepExperts


def route_torch(logits_TE: Tensor, per_token: int, sums_to_one: bool) -> tuple[Tensor, Tensor]:
    weight_TK, expert_TK = logits_TE.float().softmax(-1).topk(per_token, dim=-1)
    if sums_to_one:
        weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
    return expert_TK.to(torch.int32), weight_TK


@dataclass(frozen=True, slots=True)
class PairsByExpert:
    """All pairs of a step, grouped by the experts that were chosen."""

    num_pairs: int
    groups: list[tuple[int, Tensor]]  # for each chosen expert, its number and its pairs (int64)

    @classmethod
    def of(cls, expert_TK: Tensor) -> PairsByExpert:
        expert_N = expert_TK.flatten()
        chosen, counts = expert_N.unique(return_counts=True)
        pairs = expert_N.argsort(stable=True).split(counts.tolist())
        return cls(len(expert_N), list(zip(chosen.tolist(), pairs, strict=True)))

    def linear(self, x: Tensor, w_EOD: Tensor, adapters: StepExperts | None = None) -> LinearOutput:
        out_NO = x.new_empty(self.num_pairs, w_EOD.shape[1])
        pairs_a_row = self.num_pairs // max(len(x), 1)
        for expert, pairs in self.groups:
            out_NO[pairs] = F.linear(x[pairs // pairs_a_row], w_EOD[expert])
            if adapters is not None:
                _add_adapters(out_NO, x, expert, pairs, pairs_a_row, adapters)
        return LinearOutput(out_NO)


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


def combine_torch(y_ND: Tensor, weight_TK: Tensor) -> Tensor:
    """Returns the weighted sum of each token's pairs, [T, D], in y's dtype."""
    y_TKD = y_ND.view(*weight_TK.shape, -1)
    return (y_TKD.float() * weight_TK.unsqueeze(-1)).sum(1).to(y_ND.dtype)
