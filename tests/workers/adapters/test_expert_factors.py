"""Experts' matrices in any layout arrive in one copy where they are served, and otherwise stay where they were read."""

# E experts · G groups of outputs · X rows · Y columns

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lorafleet.workers.adapters.casting import CHUNK
from lorafleet.workers.adapters.expert_factors import ExpertFactors, FactorPiece

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def by_rank(experts: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Returns matrices that PEFT stores with the experts as the last dimension."""
    return torch.randn(rows, columns * experts, dtype=dtype).view(rows, columns, experts).permute(2, 0, 1).unsqueeze(1)


SOURCES: dict[str, Callable[[torch.dtype], Tensor]] = {
    "contiguous": lambda dtype: torch.randn(3, 2, 5, 8, dtype=dtype),
    "by rank": lambda dtype: by_rank(5, 70, 130, dtype),
    "rows of two projections in turn": lambda dtype: (
        torch.randn(3, 10, 4, dtype=dtype).unflatten(1, (5, 2)).transpose(1, 2)
    ),
    "shared by all experts": lambda dtype: torch.randn(1, 6, 4, dtype=dtype).expand(7, -1, -1).unsqueeze(1),
    "rows longer than a block": lambda dtype: torch.randn(2, 1, 2, CHUNK + 8, dtype=dtype),
    "one column": lambda dtype: by_rank(4, 9, 1, dtype),
}


@pytest.mark.parametrize("served", DTYPES, ids=str)
@pytest.mark.parametrize("stored", DTYPES, ids=str)
@pytest.mark.parametrize("source", SOURCES)
def test_values_of_any_strides_and_dtype_are_written(source: str, stored: torch.dtype, served: torch.dtype) -> None:
    values = SOURCES[source](stored)
    target = torch.full(values.shape, torch.nan, dtype=served)
    matrices = ExpertFactors((*values.shape,), served, [FactorPiece(0, 0, values)])
    matrices.write(target)
    assert torch.equal(target, values.to(served))
    assert matrices.num_values == target.numel()


def test_missing_experts_groups_and_ranks_are_zero() -> None:
    pieces = [FactorPiece(1, 0, torch.randn(1, 1, 2, 6)), FactorPiece(2, 1, torch.randn(2, 1, 4, 6))]
    target = torch.full((4, 2, 8, 6), torch.nan)
    ExpertFactors((4, 2, 8, 6), torch.float32, pieces).write(target)
    expected = torch.zeros(4, 2, 8, 6)
    expected[1:2, :1, :2], expected[2:, 1:, :4] = pieces[0].values_EGXY, pieces[1].values_EGXY
    assert torch.equal(target, expected)


def test_parts_and_experts_are_those_of_the_whole() -> None:
    whole = torch.randn(4, 2, 6, 10).bfloat16()
    matrices = ExpertFactors((4, 2, 6, 10), torch.bfloat16, [FactorPiece(e, 0, whole[e : e + 2]) for e in (0, 2)])
    part, target = matrices.part(slice(3, 5), slice(0, 8, 1)), torch.empty(4, 2, 2, 8, dtype=torch.bfloat16)
    part.write(target)
    assert part.shape == target.shape and torch.equal(target, whole[:, :, 3:5, :8])
    assert all(torch.equal(matrices.of_expert(e), whole[e].float()) for e in range(4))
