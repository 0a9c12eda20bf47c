"""The kernel that sums all ranks' rows. Ranks are streams of one GPU here; over two GPUs: tests/workers/tp."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.rank_sum import EMPTY, PROGRAMS, PeerRows, rank_sum_add_rms_norm
from tests.kernels.harness import needs_gpu

EPS = 1e-5
ROWS = (1, 300, 2, 64, 65, PROGRAMS + 488, 7, PROGRAMS, 1)  # other programs and other halves, one after another


class Ranks:
    """Of one process: what RankSum has, with a stream for each."""

    def __init__(self, size: int, area_bytes: int) -> None:
        words = PeerRows.bytes(size, area_bytes) // 2
        self._memory = [torch.full((words,), EMPTY[2], dtype=torch.int16, device="cuda") for _ in range(size)]
        addresses = torch.tensor([m.data_ptr() for m in self._memory], dtype=torch.int64, device="cuda")
        self._peers = [
            PeerRows(rank, size, addresses, torch.zeros(PROGRAMS, dtype=torch.int32, device="cuda"), area_bytes)
            for rank in range(size)
        ]
        self._streams = [torch.cuda.Stream() for _ in range(size)]

    def warm_up(self, size: int, dtype: torch.dtype) -> None:
        """A kernel that is loaded while another runs might wait for that one, which waits for it. So all are loaded
        while there are rows of zeros, for which no kernel waits."""
        for memory in self._memory:
            memory.zero_()
        x = torch.zeros(1, size, dtype=dtype, device="cuda")
        for peers in self._peers:
            for delta in (None, x):
                rank_sum_add_rms_norm(x, delta, x.clone(), x[0], EPS, peers)
            torch.cuda.synchronize()
        for memory, peers in zip(self._memory, self._peers, strict=True):
            memory.fill_(EMPTY[2])
            peers.calls_P.zero_()

    def sum(
        self, xs: list[Tensor], deltas: list[Tensor | None], residuals: list[Tensor], weight: Tensor
    ) -> list[Tensor]:
        torch.cuda.synchronize()
        outs = []
        for peers, stream, *rows in zip(self._peers, self._streams, xs, deltas, residuals, strict=True):
            with torch.cuda.stream(stream):
                outs.append(rank_sum_add_rms_norm(*rows, weight, EPS, peers))
        torch.cuda.synchronize()
        return outs


def random(rows: int, size: int, dtype: torch.dtype, zeros: float = 0.0) -> Tensor:
    x = torch.randn(rows, size, device="cuda")
    return torch.where(torch.rand_like(x) < zeros, -0.0, x).to(dtype)


pytestmark = needs_gpu


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("size", "dtype", "bound"),
    [(4096, torch.bfloat16, 0.01), (4096, torch.float16, 0.002), (96, torch.float32, 1e-5), (77, torch.bfloat16, 0.01)],
)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_equals_the_sum_of_all_ranks_rows(num_ranks: int, size: int, dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(num_ranks)
    # More than two ranks' programs must all find room on the one GPU.
    all_rows = [rows for rows in ROWS * 3 if num_ranks == 2 or rows <= 65]
    ranks = Ranks(num_ranks, max(all_rows) * size * dtype.itemsize)
    ranks.warm_up(size, dtype)
    weight = random(1, size, dtype)[0]
    for call, rows in enumerate(all_rows):
        # -0.0 is what the kernel never sends, so it must stand for 0.0.
        xs = [random(rows, size, dtype, zeros=0.3) for _ in range(num_ranks)]
        deltas = [random(rows, size, dtype) if call % 2 else None for _ in range(num_ranks)]
        before = random(rows, size, dtype)
        residuals = [before.clone() for _ in range(num_ranks)]
        outs = ranks.sum(xs, deltas, residuals, weight)
        staged = [x if d is None else (x.float() + d.float()).to(dtype) for x, d in zip(xs, deltas, strict=True)]
        total = sum((s.double() for s in staged), before.double())
        norm = total / (total.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
        for residual, out in zip(residuals, outs, strict=True):
            assert torch.equal(residual, residuals[0]) and torch.equal(out, outs[0]), "the ranks have other bits"
        torch.testing.assert_close(residuals[0].double(), total, atol=bound, rtol=bound)
        torch.testing.assert_close(outs[0].double(), norm, atol=2 * bound, rtol=2 * bound)
    for memory in ranks._memory:
        assert (memory == EMPTY[2]).all() or (dtype == torch.float32 and (memory.view(torch.int32) == EMPTY[4]).all())
