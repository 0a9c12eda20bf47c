"""Turns LoHa adapters into low-rank forms. The update is the elementwise product s (w1a w1b) o (w2a w2b).

Its rank is r^2. Each column of B is the product of a column of w1a and one of w2a. Each row of A is the product of a
row of w1b and one of w2b.
Source: FedPara, arXiv 2108.06098; PEFT 0.21's loha/layer.py.
"""

# R rank · S r^2 · D in features · O out features

from __future__ import annotations

from lorafleet.workers.adapters.forms import LinearForm, LowRank
from lorafleet.workers.adapters.kinds.kind import Kind, Target, each

LEAVES = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")


def check(target: Target) -> int:
    target.expect_leaves(*LEAVES)
    inputs, outputs = target.shape
    for factor in ("hada_w1", "hada_w2"):
        target.expect(f"{factor}_a", outputs, target.rank)
        target.expect(f"{factor}_b", target.rank, inputs)
    return target.rank**2


def form(target: Target) -> LinearForm:
    one_OR, one_RD, two_OR, two_RD = (target.float32(leaf) for leaf in LEAVES)
    a_SD = (one_RD.unsqueeze(1) * two_RD.unsqueeze(0)).flatten(0, 1)
    b_OS = (one_OR.unsqueeze(2) * two_OR.unsqueeze(1)).flatten(1)
    scaling = target.alpha / target.rank
    return LinearForm(LowRank(a_SD, b_OS, scaling))


LOHA = Kind("LoHa", LEAVES, check, each(form))
