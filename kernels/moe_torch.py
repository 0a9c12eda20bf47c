"""A mixture of experts in plain torch: the CPU's serving path and the Triton kernels' reference."""

# T tokens · E experts · K experts a token · N = T * K pairs · D in · O out

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def route_torch(logits_TE: Tensor, per_token: int, sums_to_one: bool) -> tuple[Tensor, Tensor]:
    weight_TK, expert_TK = logits_TE.float().softmax(-1).topk(per_token, dim=-1)
    if sums_to_one:
        weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
    return expert_TK.to(torch.int32), weight_TK


@dataclass(frozen=True, slots=True)
class PairsByExpert:
    """groups: (expert, its pairs, int64), of the experts that were chosen."""

    num_pairs: int
    groups: list[tuple[int, Tensor]]

    @classmethod
    def of(cls, expert_TK: Tensor) -> PairsByExpert:
        expert_N = expert_TK.flatten()
        chosen, counts = expert_N.unique(return_counts=True)
        pairs = expert_N.argsort(stable=True).split(counts.tolist())
        return cls(len(expert_N), list(zip(chosen.tolist(), pairs, strict=True)))

    def linear(self, x: Tensor, w_EOD: Tensor) -> Tensor:
        out_NO = x.new_empty(self.num_pairs, w_EOD.shape[1])
        pairs_a_row = self.num_pairs // max(len(x), 1)
        for expert, pairs in self.groups:
            out_NO[pairs] = F.linear(x[pairs // pairs_a_row], w_EOD[expert])
        return out_NO


def combine_torch(y_ND: Tensor, weight_TK: Tensor) -> Tensor:
    """[T, D]: the weighted sum of each token's pairs, in y's dtype."""
    y_TKD = y_ND.view(*weight_TK.shape, -1)
    return (y_TKD.float() * weight_TK.unsqueeze(-1)).sum(1).to(y_ND.dtype)
