"""Both kernels that sum all ranks' rows, against a sum in torch. Ranks are processes under the interpreter here."""

from __future__ import annotations

import pytest

from tests.kernels.harness import needs_triton, run_interpreted

pytestmark = needs_triton


@pytest.mark.parametrize(
    ("num_ranks", "size", "dtype", "has_branch"),
    [
        (2, 24, "float32", True),
        (3, 48, "float16", False),
        (3, 48, "float16", True),
        (4, 20, "float32", False),
    ],
)
def test_both_sums_equal_the_sum_in_torch_and_have_the_same_bits_on_all_ranks(
    num_ranks: int, size: int, dtype: str, has_branch: bool
) -> None:
    run_interpreted(
        f"""
        from torch import Tensor

        from lorafleet.kernels.decoder.rms_norm import NormWeight
        from lorafleet.kernels.lora.linear_output import LinearOutput
        from lorafleet.kernels.ranks.rank_sum import rank_sum_add_rms_norm, two_step_sum_add_rms_norm
        from tests.kernels.process_ranks import ProcessRanks

        num_ranks, size, dtype, has_branch = {num_ranks}, {size}, torch.{dtype}, {has_branch}
        EPS = 1e-5
        ROWS = (1, 4, 2, 4)  # other programs and other halves, one after another

        def random(rows: int) -> Tensor:
            x = torch.randn(rows, size)
            return x.where(torch.rand_like(x) > 0.3, -0.0).to(dtype)  # -0.0 is never sent: it must stand for 0.0

        def normed(x: Tensor, weight: Tensor) -> Tensor:
            return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()

        weight, branch_weight = random(1)[0], random(1)[0]
        branch = NormWeight(branch_weight) if has_branch else None
        calls = [
            ([random(rows) for _ in range(num_ranks)], [random(rows) for _ in range(num_ranks)], random(rows))
            for rows in ROWS
        ]

        def sums(areas, function) -> tuple[Tensor, ...]:
            results = []
            for index, (xs, deltas, before) in enumerate(calls):
                x = LinearOutput(xs[areas.rank], deltas[areas.rank] if index % 2 else None)
                residual = before.clone()
                out = function(x, residual, NormWeight(weight), EPS, areas, branch)
                results += [residual, out]
            return tuple(results)

        def on_all(function) -> list[tuple[Tensor, ...]]:
            ranks = ProcessRanks(num_ranks, max(ROWS) * size * dtype.itemsize)
            results = ranks.run(lambda areas: sums(areas, function))
            assert ranks.is_empty
            return results

        one, two = on_all(rank_sum_add_rms_norm), on_all(two_step_sum_add_rms_norm)
        bits = torch.int16 if dtype.itemsize == 2 else torch.int32
        for results in (one, two):
            for of_rank in results[1:]:
                for mine, first in zip(of_rank, results[0], strict=True):
                    assert torch.equal(mine.view(bits), first.view(bits)), "the ranks have other bits"
        for mine, first in zip(two[0], one[0], strict=True):
            assert torch.equal(mine, first), "two steps have other values than one"
        bound = 1e-5 if dtype == torch.float32 else 0.01
        for index, (xs, deltas, before) in enumerate(calls):
            staged = [
                (x.float() + d.float()).to(dtype) if index % 2 else x for x, d in zip(xs, deltas, strict=True)
            ]
            total = sum(s.double() for s in staged)
            total = before.double() + (normed(total, branch_weight) if has_branch else total)
            residual, out = two[0][2 * index : 2 * index + 2]
            torch.testing.assert_close(residual.double(), total, atol=bound, rtol=bound)
            torch.testing.assert_close(out.double(), normed(total, weight), atol=2 * bound, rtol=2 * bound)
        """
    )
