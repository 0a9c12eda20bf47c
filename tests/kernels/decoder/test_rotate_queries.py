from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.decoder.rope_store import rotate
from lorafleet.kernels.decoder.rotate_queries import rotate_queries
from tests.kernels.harness import run_interpreted

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def make(num_tokens: int, heads: int, pairs: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, ...]:
    """Queries behind five other numbers of each head, their angles, and NaN in a wider result."""
    generator = torch.Generator().manual_seed(num_tokens)
    q = torch.randn(num_tokens, heads, 5 + 2 * pairs, generator=generator).to(device, dtype)[..., 5:]
    angle = 100 * torch.rand(num_tokens, 1, pairs, generator=generator)
    out = torch.full((num_tokens, heads, 9 + 2 * pairs), torch.nan, dtype=dtype, device=device)
    return q, angle.cos().to(device, dtype), angle.sin().to(device, dtype), out


def check(rotate_into, num_tokens: int, heads: int, pairs: int, dtype: torch.dtype, device: str = "cpu") -> None:
    for is_interleaved in (False, True):
        q, cos, sin, out = make(num_tokens, heads, pairs, dtype, device)
        rotate_into(q, cos, sin, is_interleaved, out[..., 9:])
        want = rotate(q.double(), cos.double(), sin.double(), is_interleaved)
        torch.testing.assert_close(out[..., 9:].double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        assert out[..., :9].isnan().all()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_on_a_cpu(dtype: torch.dtype) -> None:
    check(rotate_queries, 3, 5, 4, dtype)


def test_interpreted_kernel() -> None:
    run_interpreted("""
        import torch
        from lorafleet.kernels.decoder.rotate_queries_triton import rotate_queries_triton
        from tests.kernels.decoder.test_rotate_queries import check

        check(rotate_queries_triton, 3, 5, 4, torch.float32)
        check(rotate_queries_triton, 2, 19, 3, torch.float16)
    """)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
class TestOnGPU:
    pytestmark = pytest.mark.gpu

    def test_equals_the_formula(self, dtype: torch.dtype) -> None:
        for sizes in ((1, 128, 32), (64, 20, 32), (1000, 16, 3)):
            check(rotate_queries, *sizes, dtype, "cuda")
