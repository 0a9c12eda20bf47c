"""Turns LoKr adapters into forms. The update is the Kronecker product s (w1 (x) w2).

Each of w1 and w2 may itself be a product of two matrices. The rank of the update is the product of their ranks. If
that rank is served, the form is A and B. Otherwise it is the Kronecker form, which needs no more bytes than the file.
Source: LyCORIS, arXiv 2309.14859; PEFT 0.21's lokr/layer.py.
"""

# O1, D1 and O2, D2: rows and columns of w1 and w2

from __future__ import annotations

import torch
from torch import Tensor

from lorafleet.protocol.errors import AdapterMismatch
from lorafleet.workers.adapters.forms import Kronecker, LinearForm, LowRank
from lorafleet.workers.adapters.kinds.kind import Kind, Target, each
from lorafleet.workers.adapters.kinds.pairs import matrix

LEAVES = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")


def check(target: Target) -> int:
    """Returns the rank, or 0 if it is too high and the Kronecker form is served."""
    target.expect_leaves(*_leaves(target, "lokr_w1"), *_leaves(target, "lokr_w2"))
    shape1, shape2 = _shape(target, "lokr_w1"), _shape(target, "lokr_w2")
    if (shape1[1] * shape2[1], shape1[0] * shape2[0]) != target.shape:
        raise AdapterMismatch(
            f"{target.module} has lokr_w1 {list(shape1)} and lokr_w2 {list(shape2)}, whose Kronecker product is "
            f"[{shape1[0] * shape2[0]}, {shape1[1] * shape2[1]}]; {target.base.named} has {target.shape[0]} inputs and "
            f"{target.shape[1]} outputs there. The adapter was made for another model."
        )
    rank = _rank(target, "lokr_w1") * _rank(target, "lokr_w2")
    return rank if rank <= target.max_rank else 0


def _leaves(target: Target, name: str) -> tuple[str, ...]:
    return (name,) if target.has(name) else (f"{name}_a", f"{name}_b")


def _shape(target: Target, name: str) -> tuple[int, int]:
    if target.has(name):
        return matrix(target, name)
    left, right = matrix(target, f"{name}_a"), matrix(target, f"{name}_b")
    target.expect(f"{name}_a", left[0], target.rank)
    target.expect(f"{name}_b", target.rank, right[1])
    return left[0], right[1]


def _rank(target: Target, name: str) -> int:
    return min(_shape(target, name)) if target.has(name) else target.rank


def form(target: Target) -> LinearForm:
    scaling = target.alpha / target.rank
    if check(target):
        left1, right1 = _factors(target, "lokr_w1")
        left2, right2 = _factors(target, "lokr_w2")
        return LinearForm(LowRank(torch.kron(right1, right2), torch.kron(left1, left2), scaling))
    return LinearForm(kronecker=Kronecker(_whole(target, "lokr_w1"), _whole(target, "lokr_w2"), scaling))


def _factors(target: Target, name: str) -> tuple[Tensor, Tensor]:
    """Returns two matrices whose product is the named one, with the smallest possible inner dimension."""
    if not target.has(name):
        return target.float32(f"{name}_a"), target.float32(f"{name}_b")
    whole = target.float32(name)
    rows, columns = whole.shape
    return (whole, torch.eye(columns)) if columns <= rows else (torch.eye(rows), whole)


def _whole(target: Target, name: str) -> Tensor:
    return target.value(name) if target.has(name) else target.float32(f"{name}_a") @ target.float32(f"{name}_b")


LOKR = Kind("LoKr", LEAVES, check, each(form))
