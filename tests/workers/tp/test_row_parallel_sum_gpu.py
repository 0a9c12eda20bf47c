"""The kernels that sum all ranks' rows, over two GPUs, against a sum in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.decoder.rms_norm import NormWeight
from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.workers.tp.group import TPGroup
from lorafleet.workers.tp.row_parallel_sum import RankSum
from ranks import on_ranks

pytestmark = pytest.mark.gpu(2)
EPS = 1e-5
ROWS = (1, 300, 2, 64, 65, 1000, 7)  # other programs and halves, one after another


def inputs(seed: int, rows: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)).to(dtype).cuda()


def sums(group: TPGroup, size: int, dtype: torch.dtype, two_steps_from_bytes: int | None) -> list[float]:
    """The largest errors of residual and norm, of calls in a row and of a graph replayed."""
    ranks = RankSum(group, torch.device("cuda", 0), two_steps_from_bytes)
    assert ranks._one_step is not None and ranks._two_steps is not None, "the GPUs cannot reach each other's memory"
    errors = []

    def parts(call: int, rows: int) -> tuple[list[Tensor], list[Tensor | None]]:
        xs = [inputs(100 * call + rank, rows, size, dtype) for rank in range(group.size)]
        return xs, [
            inputs(100 * call + 50 + rank, rows, size, dtype) if call % 2 else None for rank in range(group.size)
        ]

    weight = inputs(1, 1, size, dtype)[0]

    def check(call: int, before: Tensor, residual: Tensor, out: Tensor) -> None:
        xs, deltas = parts(call, len(before))
        staged = [x if d is None else (x.float() + d.float()).to(dtype) for x, d in zip(xs, deltas, strict=True)]
        total = sum((s.double() for s in staged), before.double())
        norm = total / (total.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
        errors.append(((residual.double() - total) / total.abs().clamp(min=1)).abs().max().item())
        errors.append(((out.double() - norm) / norm.abs().clamp(min=1)).abs().max().item())

    for call, rows in enumerate(ROWS * 3):
        xs, deltas = parts(call, rows)
        before = inputs(7, rows, size, dtype)
        residual = before.clone()
        out = ranks.add_rms_norm(LinearOutput(xs[group.rank], deltas[group.rank]), residual, NormWeight(weight), EPS)
        check(call, before, residual, out)

    # An odd number of calls in a graph: the halves change places from replay to replay.
    xs, deltas = parts(1, 64)
    before = inputs(7, 64, size, dtype)
    residual = before.clone()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        residual.copy_(before)
        for _ in range(3):
            residual.copy_(before)
            out = ranks.add_rms_norm(
                LinearOutput(xs[group.rank], deltas[group.rank]), residual, NormWeight(weight), EPS
            )
    for _ in range(20):
        out.zero_()
        graph.replay()
        check(1, before, residual, out)
    return errors


@pytest.mark.parametrize(("size", "dtype", "bound"), [(4096, torch.bfloat16, 0.01), (96, torch.float32, 1e-5)])
@pytest.mark.parametrize("two_steps_from_bytes", [None, 0], ids=["as measured", "two steps"])
def test_equals_the_sum_of_all_ranks_rows(
    size: int, dtype: torch.dtype, bound: float, two_steps_from_bytes: int | None
) -> None:
    found = on_ranks(2, sums, size, dtype, two_steps_from_bytes, device="cuda")
    assert found[0] == found[1], "the ranks have other bits"
    assert max(found[0]) < bound
