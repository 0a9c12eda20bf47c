"""Turns DeLoRA adapters into low-rank forms.

A's rows and B's columns are normalized to length 1, and one trained lambda sets their strength. Inputs are scaled by
the lengths of the base's columns, which the file stores.
Source: arXiv 2503.18225; PEFT 0.21's delora/layer.py.
"""

# R rank · D in features · O out features

from __future__ import annotations

from lorafleet.workers.adapters.forms import LinearForm, LowRank
from lorafleet.workers.adapters.kinds.kind import Kind, Target, each

A, B, LAMBDA, COLUMN_NORMS = "delora_A", "delora_B", "delora_lambda", "delora_w_norm"
_LEAST_NORM = 1e-4


def check(target: Target) -> int:
    target.expect_leaves(A, B, LAMBDA, COLUMN_NORMS)
    inputs, outputs = target.shape
    target.expect(A, target.rank, inputs)
    target.expect(B, outputs, target.rank)
    target.expect(LAMBDA, 1)
    target.expect(COLUMN_NORMS, inputs)
    return target.rank


def form(target: Target) -> LinearForm:
    a_RD, b_OR = target.float32(A), target.float32(B)
    a_unit_RD = a_RD / a_RD.norm(dim=1, keepdim=True).clamp(min=_LEAST_NORM)
    b_unit_OR = b_OR / b_OR.norm(dim=0, keepdim=True).clamp(min=_LEAST_NORM)
    scaled_RD = a_unit_RD * target.float32(COLUMN_NORMS)
    return LinearForm(LowRank(scaled_RD, b_unit_OR, target.float32(LAMBDA).item() / target.rank))


DELORA = Kind("DeLoRA", (A, B, LAMBDA, COLUMN_NORMS), check, each(form))
