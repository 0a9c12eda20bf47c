"""The kernels that sum all ranks' rows. Ranks are streams of one GPU here; over two GPUs: tests/workers/tp."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.decoder.rms_norm import NormWeight
from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.ranks.peer_areas import PROGRAMS, PeerAreas
from lorafleet.kernels.ranks.rank_sum import rank_sum_add_rms_norm, two_step_sum_add_rms_norm
from tests.kernels.one_gpu_ranks import Ranks
from tests.kernels.vector_cases import own_affine, own_vectors

pytestmark = pytest.mark.gpu
EPS = 1e-5
ROWS = (1, 300, 2, 64, 65, PROGRAMS + 488, 7, PROGRAMS, 1)  # other programs and other halves, one after another


def random(rows: int, size: int, dtype: torch.dtype, zeros: float = 0.0) -> Tensor:
    x = torch.randn(rows, size, device="cuda")
    return torch.where(torch.rand_like(x) < zeros, -0.0, x).to(dtype)


Sum = Callable[..., Tensor]
both_sums = pytest.mark.parametrize("function", [rank_sum_add_rms_norm, two_step_sum_add_rms_norm])


def sums(
    function: Sum,
    x: Tensor,
    delta: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    areas: PeerAreas,
    branch: NormWeight | None = None,
) -> Tensor:
    return function(LinearOutput(x, delta), residual, NormWeight(weight), EPS, areas, branch)


@pytest.mark.parametrize(
    ("size", "dtype", "bound"),
    [(4096, torch.bfloat16, 0.01), (4096, torch.float16, 0.002), (96, torch.float32, 1e-5), (77, torch.bfloat16, 0.01)],
)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@both_sums
def test_equals_the_sum_of_all_ranks_rows(
    function: Sum, num_ranks: int, size: int, dtype: torch.dtype, bound: float
) -> None:
    torch.manual_seed(num_ranks)
    if function is two_step_sum_add_rms_norm:
        size -= size % num_ranks
    all_rows = [rows for rows in ROWS * 3 if num_ranks == 2 or rows <= 65]
    ranks = Ranks(num_ranks, max(all_rows) * size * dtype.itemsize)
    x = random(1, size, dtype)
    for delta in (None, x):
        ranks.warm_up(lambda areas, x=x, delta=delta: sums(function, x, delta, x.clone(), x[0], areas))
    weight = random(1, size, dtype)[0]
    for call, rows in enumerate(all_rows):
        # -0.0 is what the kernel never sends, so it must stand for 0.0.
        xs = [random(rows, size, dtype, zeros=0.3) for _ in range(num_ranks)]
        deltas = [random(rows, size, dtype) if call % 2 else None for _ in range(num_ranks)]
        before = random(rows, size, dtype)
        residuals = [before.clone() for _ in range(num_ranks)]

        def add(areas: PeerAreas, rows=(xs, deltas, residuals)) -> Tensor:
            return sums(function, *(of_rank[areas.rank] for of_rank in rows), weight, areas)

        outs = ranks.run(add)
        staged = [x if d is None else (x.float() + d.float()).to(dtype) for x, d in zip(xs, deltas, strict=True)]
        total = sum((s.double() for s in staged), before.double())
        norm = total / (total.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
        for residual, out in zip(residuals, outs, strict=True):
            assert torch.equal(residual, residuals[0]) and torch.equal(out, outs[0]), "the ranks have other bits"
        torch.testing.assert_close(residuals[0].double(), total, atol=bound, rtol=bound)
        torch.testing.assert_close(outs[0].double(), norm, atol=2 * bound, rtol=2 * bound)
    assert ranks.is_empty


@pytest.mark.parametrize(("size", "dtype", "bound"), [(2304, torch.bfloat16, 0.02), (96, torch.float32, 1e-5)])
@both_sums
def test_a_branch_may_have_a_norm_of_its_own(function: Sum, size: int, dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(2)
    ranks = Ranks(2, 300 * size * dtype.itemsize)
    branch, weight = (1 + torch.randn(size, device="cuda") / 10 for _ in range(2))
    x = random(1, size, dtype)
    ranks.warm_up(lambda areas: sums(function, x, x, x.clone(), weight, areas, NormWeight(branch)))
    for rows in (1, 300, 64):
        xs, deltas = ([random(rows, size, dtype) for _ in range(2)] for _ in range(2))
        before = random(rows, size, dtype)
        residuals = [before.clone() for _ in range(2)]

        def add(areas: PeerAreas, of=(xs, deltas, residuals)) -> Tensor:
            return sums(function, *(of_rank[areas.rank] for of_rank in of), weight, areas, NormWeight(branch))

        outs = ranks.run(add)
        staged = [(x.float() + d.float()).to(dtype) for x, d in zip(xs, deltas, strict=True)]
        total = before.double() + normed(staged[0].double() + staged[1].double(), branch)
        for residual, out in zip(residuals, outs, strict=True):
            torch.testing.assert_close(residual.double(), total, atol=bound, rtol=bound)
            torch.testing.assert_close(out.double(), normed(total, weight), atol=2 * bound, rtol=2 * bound)
    assert ranks.is_empty


@pytest.mark.parametrize(("size", "dtype", "bound"), [(4096, torch.bfloat16, 0.02), (96, torch.float32, 1e-5)])
@both_sums
def test_tokens_with_vectors_of_their_own(function: Sum, size: int, dtype: torch.dtype, bound: float) -> None:
    """Each rank scales and biases its own part; the norm's weights are the same on all. Few rows: both ranks' must find
    room on this one GPU, and these programs have more registers."""
    torch.manual_seed(3)
    ranks = Ranks(2, 100 * size * dtype.itemsize)
    weight, x = random(1, size, dtype)[0], random(1, size, dtype)
    none_T = torch.zeros(1, dtype=torch.int64, device="cuda")
    one = LinearOutput(x, x, none_T.expand(2, 1).contiguous())
    own_norm = NormWeight(weight, none_T)
    ranks.warm_up(lambda areas: function(one, x.clone(), own_norm, EPS, areas))
    for rows in (1, 100, 65):
        xs, deltas = ([random(rows, size, dtype) for _ in range(2)] for _ in range(2))
        affines = [own_affine(rows, size, "cuda", seed) for seed in (1, 4)]
        own = own_vectors(rows, size, 0.0, "cuda", 7)
        before = random(rows, size, dtype)
        residuals = [before.clone() for _ in range(2)]
        outputs = [LinearOutput(x, d, a.affine_2T) for x, d, a in zip(xs, deltas, affines, strict=True)]
        norm = NormWeight(weight, own.address_T)

        def add(areas: PeerAreas, of=(outputs, residuals), norm=norm) -> Tensor:
            return function(of[0][areas.rank], of[1][areas.rank], norm, EPS, areas)

        outs = ranks.run(add)
        total = before.double() + sum(a.of(x, d) for x, d, a in zip(xs, deltas, affines, strict=True))
        weights = torch.where(own.address_T[:, None] == 0, weight.float(), own.value_TO)
        for residual, out in zip(residuals, outs, strict=True):
            torch.testing.assert_close(residual.double(), total, atol=2 * bound, rtol=2 * bound)
            torch.testing.assert_close(out.double(), normed(residual.double(), weights), atol=2 * bound, rtol=2 * bound)
    assert ranks.is_empty


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
