from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.decoder.merge_parts import merge_parts
from tests.kernels.harness import poison_free_memory, run_interpreted

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def check(
    merge: Callable[..., None],
    parts: int,
    rows: list[int],
    heads: int,
    size: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> None:
    """Compares with one softmax over all keys. Seven keys belong to each part, and three to the rows' own results."""
    generator = torch.Generator().manual_seed(heads)
    num_keys, num_tokens = 3 + 7 * parts, max(rows) + 2
    score_THK = 20 * torch.randn(num_tokens, heads, num_keys, generator=generator, dtype=torch.float64)
    value_KD = torch.randn(num_keys, size, generator=generator, dtype=torch.float64)

    def attention(keys: slice) -> tuple[Tensor, Tensor]:
        score = score_THK[..., keys]
        return (score.softmax(-1) @ value_KD[keys]).to(device, dtype), (score.logsumexp(-1) / 0.6931471805599453).to(
            device, torch.float32
        )

    out_THD, log_sum_TH = attention(slice(3))
    untouched = out_THD.clone()
    done = [attention(slice(3 + 7 * part, 10 + 7 * part)) for part in range(parts)]
    part_SNHD = torch.stack([values[rows] for values, _ in done])
    part_log_sum_SNH = torch.stack([log_sum[rows] for _, log_sum in done])
    merge(out_THD, log_sum_TH, part_SNHD, part_log_sum_SNH, torch.tensor(rows, dtype=torch.int32, device=device))
    want = attention(slice(num_keys))[0].double()
    torch.testing.assert_close(out_THD[rows].double(), want[rows], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    others = [row for row in range(num_tokens) if row not in rows]
    assert torch.equal(out_THD[others], untouched[others])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_on_a_cpu(dtype: torch.dtype) -> None:
    check(merge_parts, 3, [4, 0, 2], 5, 6, dtype)


def test_interpreted_kernel() -> None:
    run_interpreted("""
        import torch
        from lorafleet.kernels.decoder.merge_parts_triton import merge_parts_triton
        from tests.kernels.decoder.test_merge_parts import check

        check(merge_parts_triton, 1, [1], 3, 16, torch.float32)
        check(merge_parts_triton, 4, [5, 0, 2], 11, 24, torch.float32)
        check(merge_parts_triton, 2, [0, 1], 8, 16, torch.float16)
    """)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
class TestOnGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("parts", [1, 4, 8])
    def test_equals_one_softmax(self, parts: int, dtype: torch.dtype) -> None:
        poison_free_memory()
        check(merge_parts, parts, [*range(3, 200), 0], 32, 128, dtype, "cuda")
        check(merge_parts, parts, [2], 5, 64, dtype, "cuda")
