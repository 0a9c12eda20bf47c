"""Linears of fixed order give right products, and each row's bits are the same beside any others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lorafleet.kernels.linear.fixed_linear import FixedWeight, fixed_linear
from tests.kernels.harness import run_interpreted


def test_interpreted_kernel() -> None:
    run_interpreted("""
        from lorafleet.kernels.linear import fixed_linear_triton as module
        from tests.kernels.interpreter import add_in_order

        add_in_order()
        module.BLOCK_T, module.GROUP_T = 16, 2
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 4e-3)):
            for outputs, inputs in ((48, 64), (70, 90)):
                x, w = torch.randn(83, inputs).to(dtype), (torch.randn(outputs, inputs) * inputs**-0.5).to(dtype)
                for bias in (None, torch.randn(outputs).to(dtype)):
                    whole = module.fixed_linear_triton(x, w, bias)
                    want = torch.nn.functional.linear(x.double(), w.double(), None if bias is None else bias.double())
                    torch.testing.assert_close(whole.double(), want, atol=tolerance, rtol=tolerance)
                    for first, end in ((0, 1), (82, 83), (5, 40)):
                        part = module.fixed_linear_triton(x[first:end].clone(), w, bias)
                        assert torch.equal(part, whole[first:end])
        assert module.fixed_linear_triton(x[:0], w, None).shape == (0, 70)
    """)


def test_a_weight_adds_what_it_multiplies() -> None:
    weight = FixedWeight.empty(6, 4, torch.float32, torch.device("cpu"))
    weight.weight.data.normal_()
    x, y = torch.randn(3, 4), torch.randn(3, 6)
    torch.testing.assert_close(weight.linear(x, None), F.linear(x, weight.weight))
    torch.testing.assert_close(weight.add_linear(y.clone(), x), y + F.linear(x, weight.weight))


class TestOnGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    @pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 14336), (28672, 4096), (130, 77)])
    def test_rows_have_the_same_bits_in_every_batch(self, outputs: int, inputs: int, dtype: torch.dtype) -> None:
        x, bias = torch.randn(1500, inputs, device="cuda").to(dtype), torch.randn(outputs, device="cuda").to(dtype)
        w = (torch.randn(outputs, inputs, device="cuda") * inputs**-0.5).to(dtype)
        whole = fixed_linear(x, w, bias)
        torch.testing.assert_close(
            whole[:64].double(), F.linear(x[:64].double(), w.double(), bias.double()), atol=3e-2, rtol=3e-2
        )
        for first, end in ((0, 1), (0, 2), (7, 24), (100, 164), (1499, 1500), (3, 1003)):
            assert torch.equal(fixed_linear(x[first:end].clone(), w, bias), whole[first:end])
