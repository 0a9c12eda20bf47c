from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.quant.fp8 import FP8, FP8_MAX
from lorafleet.kernels.quant.fp8_weight import FUSED_TOKENS, FP8Weight, quantize_rows
from tests.kernels.harness import needs_gpu, poison_free_memory, run_interpreted


def held(values_OD: Tensor, place: tuple[slice, slice] | None = None) -> FP8Weight:
    rows, columns = place = place or (slice(0, len(values_OD)), slice(0, values_OD.shape[1]))
    shape = rows.stop - rows.start, columns.stop - columns.start
    weight = FP8Weight(*shape, values_OD.dtype, values_OD.device)
    weight.fill(0, quantize_rows(values_OD), place)
    return weight


def reference(values_OD: Tensor) -> Tensor:
    """In float32, each row's largest magnitude made e4m3's."""
    scale_O1 = values_OD.float().abs().amax(dim=1, keepdim=True) / FP8_MAX
    return (values_OD.float() / scale_O1).to(FP8).float() * scale_O1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_weight_is_rounded_row_by_row(dtype: torch.dtype) -> None:
    values = (torch.randn(24, 40) * torch.logspace(-3, 3, 24)[:, None]).to(dtype)
    assert torch.equal(held(values).dequantized(), reference(values).to(dtype))
    assert torch.equal(held(values).dequantized(slice(3, 9)), reference(values)[3:9].to(dtype))


def test_a_ranks_part_has_the_wholes_values() -> None:
    values = torch.randn(24, 40)
    place = slice(4, 20), slice(10, 30)
    assert torch.equal(held(values, place).dequantized(), reference(values)[place])


def test_a_row_of_zeros_stays_zero() -> None:
    assert not held(torch.zeros(2, 64)).dequantized().any()


def test_products_are_those_of_the_values() -> None:
    values, x, bias = torch.randn(48, 64), torch.randn(5, 64), torch.randn(48)
    want = x @ reference(values).T + bias
    torch.testing.assert_close(held(values).linear(x, bias), want)
    torch.testing.assert_close(held(values).add_linear(bias.repeat(5, 1), x), want)


def test_the_kernel_in_the_interpreter() -> None:
    """The e4m3 numbers as float32's, which the interpreter knows."""
    run_interpreted(
        """
        import torch
        from lorafleet.kernels.lora import split_sum_triton
        from lorafleet.kernels.quant import fp8_linear_triton as kernels
        kernels.FP8 = torch.float32
        for programs in (1, 64):
            split_sum_triton.PROGRAMS = programs
            cases = ((1, (70, 1024), True), (19, (64, 1088), False), (3, (20, 96), True))
            for tokens, (outputs, inputs), has_bias in cases:
                w, x, scale = torch.randn(outputs, inputs), torch.randn(tokens, inputs), torch.rand(outputs)
                bias = torch.randn(outputs) if has_bias else None
                torch.testing.assert_close(
                    kernels.fp8_linear_triton(x, w, scale, bias),
                    torch.nn.functional.linear(x, w * scale[:, None], bias), rtol=1e-4, atol=1e-4)
        """
    )


class TestOnGPU:
    pytestmark = needs_gpu

    @pytest.mark.parametrize("num_tokens", [1, 7, 16, 33, 64, FUSED_TOKENS + 1, 300])
    @pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336), (272, 192), (50, 36)], ids=str)
    def test_products_are_those_of_the_values(self, shape: tuple[int, int], num_tokens: int) -> None:
        """With the tokens' own rounding, where there are many; shapes that e4m3 GEMMs do not take have none."""
        values = (torch.randn(shape, device="cuda") / math.sqrt(shape[1])).bfloat16()
        weight, want = held(values), reference(values)
        x, bias = (torch.randn(n, device="cuda").bfloat16() for n in ((num_tokens, shape[1]), (shape[0],)))
        rounds_x = num_tokens > FUSED_TOKENS and shape[0] % 16 == 0
        poison_free_memory()
        exact = (reference(x) if rounds_x else x.float()) @ want.T + bias.float()
        for got in (weight.linear(x, bias), weight.add_linear(bias.repeat(num_tokens, 1), x)):
            assert (got.float() - exact).norm() / exact.norm() < 5e-3

    def test_tokens_are_rounded_as_rows_of_a_weight_are(self) -> None:
        from lorafleet.kernels.quant.fp8_linear_triton import quantize_tokens_triton

        for size in (64, 4096, 14336, 600):
            x = torch.randn(5, size, device="cuda").bfloat16()
            x[3] = 0
            rounded, scale = quantize_tokens_triton(x)
            want = quantize_rows(x)
            assert torch.equal(scale, want.scale_O)
            assert torch.equal(rounded.float(), want.weight_OD.float())
