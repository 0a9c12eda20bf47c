"""Computes with low-rank pairs and never makes the [out, in] matrix that they stand for.

All arithmetic is in float64: the factors are small, and singular values of a float32 product would lose half of their
digits.
"""

# R rank · N rank kept · D in features · O out features

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lorafleet.workers.adapters.forms import Kronecker, LowRank


@dataclass(frozen=True, slots=True)
class Reduced:
    """A pair whose rank may have been reduced."""

    pair: LowRank
    norm: float  # Frobenius norm of the whole delta.
    lost: float  # Frobenius norm of what was cut off.

    @property
    def relative_error(self) -> float:
        return self.lost / self.norm if self.norm else 0.0


def reduce_rank(pair: LowRank, rank: int) -> Reduced:
    """Returns the nearest pair of that rank in the Frobenius norm (Eckart-Young). A pair whose rank is no larger does
    not change."""
    if pair.rank <= rank:
        return Reduced(pair, frobenius(pair), 0.0)
    u_OR, s_R, v_RD = svd_of_product(pair)
    kept = _balanced(u_OR[:, :rank], s_R[:rank], v_RD[:rank])
    return Reduced(kept, s_R.norm().item(), s_R[rank:].norm().item())


def no_larger_than_the_matrix(pair: LowRank) -> LowRank:
    """Reduces a pair whose rank exceeds the matrix's rows or columns, as LoHa's and LoKr's may. The product stays the
    same."""
    most = min(pair.a_RD.shape[1], pair.b_OR.shape[0])
    return pair if pair.rank <= most else reduce_rank(pair, most).pair


def svd_of_product(pair: LowRank) -> tuple[Tensor, Tensor, Tensor]:
    """Returns U [O, K], S [K] and V [K, D] of scaling * B A, where K is the smallest of R, O and D. It takes the QR
    of both factors, and the SVD of the small matrix between them."""
    q_b_OK, r_b_KR = torch.linalg.qr(pair.b_OR.double())
    q_a_DK, r_a_KR = torch.linalg.qr(pair.a_RD.double().T)
    u, s_K, v = torch.linalg.svd(pair.scaling * (r_b_KR @ r_a_KR.T), full_matrices=False)
    return q_b_OK @ u, s_K, v @ q_a_DK.T


def from_kronecker(form: Kronecker, rank: int | None = None) -> LowRank:
    """Returns an exact pair if `rank` is None, otherwise the nearest pair of that rank. The SVD of w1 (x) w2 is the
    Kronecker product of the SVDs of w1 and w2."""
    u1, s1, v1 = torch.linalg.svd(form.w1.double(), full_matrices=False)
    u2, s2, v2 = torch.linalg.svd(form.w2.double(), full_matrices=False)
    products = torch.outer(_without_noise(s1, form.w1), _without_noise(s2, form.w2))
    order = products.flatten().argsort(descending=True, stable=True)
    significant = int(products.count_nonzero())
    order = order[: max(1, min(significant, rank or significant))]
    i, j = order // len(s2), order % len(s2)
    b_OR = torch.stack([torch.kron(u1[:, p], u2[:, q]) for p, q in zip(i, j, strict=True)], 1)
    a_RD = torch.stack([torch.kron(v1[p], v2[q]) for p, q in zip(i, j, strict=True)])
    pair = _balanced(b_OR, products.flatten()[order], a_RD)
    return LowRank(pair.a_RD, pair.b_OR, form.scaling)


def _without_noise(values: Tensor, matrix: Tensor) -> Tensor:
    """Replaces singular values that are only rounding errors of float32 by zero, so that they do not count as rank."""
    least = values[0] * torch.finfo(torch.float32).eps * math.sqrt(max(matrix.shape))
    return torch.where(values > least, values, 0.0)


def frobenius(pair: LowRank) -> float:
    """Returns |scaling * B A|, computed from the trace of (B^T B)(A A^T)."""
    a_RD, b_OR = pair.a_RD.double(), pair.b_OR.double()
    square = ((b_OR.T @ b_OR) * (a_RD @ a_RD.T)).sum().item()
    return abs(pair.scaling) * math.sqrt(max(square, 0.0))


def difference(pair: LowRank | None, other: LowRank | None) -> LowRank:
    """Returns pair - other by stacking ranks. None stands for no change."""
    parts = [(part, sign) for part, sign in ((pair, 1.0), (other, -1.0)) if part is not None]
    return stacked([LowRank(part.a_RD, part.b_OR, sign * part.scaling) for part, sign in parts])


def stacked(pairs: Sequence[LowRank]) -> LowRank:
    """Returns the sum of the pairs. Its rank is the sum of their ranks."""
    a_RD = torch.cat([pair.scaling * pair.a_RD.double() for pair in pairs])
    return LowRank(a_RD, torch.cat([pair.b_OR.double() for pair in pairs], 1))


def total_error(reduced: Sequence[Reduced]) -> float:
    norm = math.hypot(*(reduction.norm for reduction in reduced))
    return math.hypot(*(reduction.lost for reduction in reduced)) / norm if norm else 0.0


def _balanced(u_ON: Tensor, s_N: Tensor, v_ND: Tensor) -> LowRank:
    """Gives A and B the square root of each singular value, so that neither leaves the range of a 16-bit float."""
    root_N = s_N.sqrt()
    return LowRank((root_N[:, None] * v_ND).float(), (u_ON * root_N).float())
