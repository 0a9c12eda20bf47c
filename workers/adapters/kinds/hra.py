"""Turns HRA adapters into low-rank forms. HRA multiplies W by r reflections I - 2 u u^T.

Their product is I - U T U^T with a small triangular T, so W changes by -(W U T) U^T, which has rank r.
Source: arXiv 2405.17484; the compact WY form, Schreiber and Van Loan 1989.
"""

# R rank · D in features · O out features

from __future__ import annotations

import torch
from torch import Tensor

from lorafleet.protocol.errors import AdapterMalformed, AdapterUnsupported
from lorafleet.workers.adapters.forms import LinearForm, LowRank
from lorafleet.workers.adapters.kinds.kind import Kind, Target, each, on, row_chunks

U = "hra_u"
_LEAST_PIVOT = 1e-3  # least length of a normalized column outside the span of those before it


def check(target: Target) -> int:
    target.expect_leaves(U)
    target.expect(U, target.shape[0], target.rank)
    return target.rank


def form(target: Target) -> LinearForm:
    norms_R = target.value(U).double().norm(dim=0)
    if not (norms_R > 0).all():
        raise AdapterMalformed(f"{target.module} has a reflection vector of length zero in {U}.")
    u_DR = target.value(U).double() / norms_R
    if target.helper.flag("apply_GS"):
        u_DR, t_RR = _orthogonal(u_DR, target.module)
    else:
        t_RR = _product(u_DR)
    with target.weights.beside_the_steps():
        weight_OD = target.base_weight()
        reflected_DR = on(-(u_DR @ t_RR), weight_OD.device)
        b_OR = torch.cat([weight_OD[rows].float() @ reflected_DR for rows in row_chunks(weight_OD)]).cpu()
    return LinearForm(LowRank(u_DR.T.float(), b_OR))


def _product(u_DR: Tensor) -> Tensor:
    """Returns T for the product of the reflections, from the first to the last."""
    rank = u_DR.shape[1]
    gram_RR = u_DR.T @ u_DR
    t_RR = torch.zeros(rank, rank, dtype=u_DR.dtype)
    for i in range(rank):
        t_RR[:i, i] = -2.0 * (t_RR[:i, :i] @ gram_RR[:i, i])
        t_RR[i, i] = 2.0
    return t_RR


def _orthogonal(u_DR: Tensor, module: str) -> tuple[Tensor, Tensor]:
    """Returns the columns made orthogonal, as apply_GS asks, and their T.

    Raises AdapterUnsupported if a column nearly lies in the span of others: PEFT would reflect by its rounding error.
    """
    q_DR, r_RR = torch.linalg.qr(u_DR)
    if r_RR.diagonal().abs().min() < _LEAST_PIVOT:
        raise AdapterUnsupported(
            f"{module} has nearly linearly dependent reflections, which apply_GS cannot orthogonalize reliably."
        )
    return q_DR, 2.0 * torch.eye(u_DR.shape[1], dtype=u_DR.dtype)


HRA = Kind("HRA", (U,), check, each(form))
