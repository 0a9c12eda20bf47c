from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.decoder.head_gate import head_gate
from lorafleet.kernels.lora.linear_output import LinearOutput, SplitSums
from tests.kernels.harness import poison_free_memory, run_interpreted
from tests.kernels.vector_cases import own_affine

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
TOKENS, HEADS, STORED = 5, 3, 2  # The last heads of a row are a key and a value.


def make_case(head_dim: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Returns attention's result, the linear's output and an adapter's addition to it."""
    generator = torch.Generator().manual_seed(head_dim)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    width = (2 * HEADS + STORED) * head_dim
    return normal(TOKENS, HEADS, head_dim), normal(TOKENS, width), normal(TOKENS, width)


def check(x: Tensor, rows: Tensor, out: Tensor) -> None:
    """rows are the sums of all parts, in float64."""
    for h in range(HEADS):
        start = (2 * h + 1) * x.shape[2]
        expected = x[:, h].double() / (1 + (-rows[:, start : start + x.shape[2]]).exp())
        torch.testing.assert_close(out[:, h].double(), expected, atol=TOLERANCE[x.dtype], rtol=TOLERANCE[x.dtype])
    assert out.dtype == x.dtype


def check_kernel(gate, head_dim: int, dtype: torch.dtype, device: str) -> None:
    x, y, delta = make_case(head_dim, dtype, device)
    check(x, y.double(), gate(x, LinearOutput(y)))
    affine = own_affine(TOKENS, y.shape[1], device)
    check(x, affine.of(y, delta), gate(x, LinearOutput(y, delta, affine.affine_2T)))
    sums = SplitSums(torch.stack((y.float(), delta.float())), early=False)
    check(x, y.double() + delta.double(), gate(x, LinearOutput(torch.full_like(y, torch.nan), sums=sums)))


def test_on_a_cpu() -> None:
    x, y, delta = make_case(8, torch.float32)
    check(x, y.double(), head_gate(x, LinearOutput(y)))
    check(x, y.double() + delta.double(), head_gate(x, LinearOutput(y, delta)))


def test_interpreted_kernel() -> None:
    run_interpreted("""
        from lorafleet.kernels.decoder import head_gate_triton
        from tests.kernels.decoder.test_head_gate import check_kernel

        head_gate_triton.BLOCK = 16
        check_kernel(head_gate_triton.head_gate_triton, 10, torch.float32, "cpu")
    """)


class TestOnGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    def test_equals_the_formula(self, dtype: torch.dtype) -> None:
        for head_dim in (24, 256):
            poison_free_memory()
            check_kernel(head_gate, head_dim, dtype, "cuda")
