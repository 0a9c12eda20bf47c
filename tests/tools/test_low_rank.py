"""Arithmetic on factors against the same on whole matrices."""

from __future__ import annotations

import pytest
import torch

from lorafleet.tools.low_rank import (
    difference,
    frobenius,
    from_kronecker,
    no_larger_than_the_matrix,
    reduce_rank,
    total_error,
)
from lorafleet.workers.adapters.forms import Kronecker, LowRank


def pair(rank: int, into: int = 24, out: int = 20, *, scaling: float = 0.5, seed: int = 0) -> LowRank:
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(rank, into, generator=generator), torch.randn(out, rank, generator=generator)
    return LowRank(a, b, scaling)


def dense(one: LowRank) -> torch.Tensor:
    return one.scaling * one.b_OR.double() @ one.a_RD.double()


@pytest.mark.parametrize("scaling", [0.5, -2.0])
@pytest.mark.parametrize("rank", [1, 3, 6])
def test_a_lower_rank_is_the_nearest(rank, scaling):
    one = pair(6, scaling=scaling)
    done = reduce_rank(one, rank)
    values = torch.linalg.svdvals(dense(one))
    assert (dense(one) - dense(done.pair)).norm().item() == pytest.approx(values[rank:].norm().item(), abs=1e-5)
    assert done.lost == pytest.approx(values[rank:].norm().item(), abs=1e-9)
    assert done.norm == pytest.approx(values.norm().item())
    assert done.pair.rank == rank


def test_small_differences_of_large_numbers_are_not_lost():
    one = pair(4)
    near = LowRank(one.a_RD, one.b_OR, one.scaling * (1 + 1e-4))
    assert frobenius(difference(near, one)) == pytest.approx(1e-4 * frobenius(one), rel=1e-3)
    assert frobenius(difference(None, one)) == pytest.approx(frobenius(one))


def test_more_ranks_than_the_matrix_has_are_folded():
    one = pair(30)
    folded = no_larger_than_the_matrix(one)
    assert folded.rank == 20
    torch.testing.assert_close(dense(folded), dense(one), atol=1e-4, rtol=1e-5)
    assert no_larger_than_the_matrix(pair(5)).rank == 5


def test_a_kronecker_product_has_the_product_of_the_ranks():
    low = torch.randn(6, 2, generator=torch.Generator().manual_seed(1)) @ torch.randn(2, 5)
    form = Kronecker(low, torch.randn(3, 4), 0.7)
    found = from_kronecker(form)
    assert found.rank == 2 * 3
    torch.testing.assert_close(dense(found).float(), 0.7 * torch.kron(form.w1, form.w2), atol=1e-4, rtol=1e-4)


def test_the_error_of_all_is_weighted_by_their_size():
    parts = [reduce_rank(pair(4, seed=i, scaling=scale), 2) for i, scale in enumerate((0.1, 5.0))]
    whole, cut = (torch.cat([tensor.flatten() for tensor in tensors]) for tensors in (
        [dense(pair(4, seed=i, scaling=scale)) for i, scale in enumerate((0.1, 5.0))],
        [dense(part.pair) for part in parts],
    ))  # fmt: skip
    assert total_error(parts) == pytest.approx(((whole - cut).norm() / whole.norm()).item(), abs=1e-6)
