from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.decoder.scratch import Scratch
from lorafleet.kernels.quant.e2m1 import E2M1Matrix, e2m1_book, powers_of_two, quantize_e2m1
from lorafleet.kernels.quant.e2m1_scheme import MXFP4, NVFP4, E2M1Scheme
from lorafleet.kernels.quant.nf4 import NF4Weight
from tests.kernels.harness import poison_free_memory, run_interpreted

BOOK = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def made(scheme: E2M1Scheme, shape: tuple[int, int], device: str = "cpu") -> tuple[E2M1Matrix, Tensor]:
    """Returns a matrix and its values, float32, which are looked up one by one."""
    outputs, inputs = shape
    code = torch.randint(0, 16, shape)
    exponent = torch.randint(118, 124, (outputs, inputs // scheme.group), dtype=torch.uint8)
    packed = (code[:, ::2] + 16 * code[:, 1::2]).to(torch.uint8).to(device)
    book = e2m1_book(torch.device(device))
    matrix = E2M1Matrix(packed, exponent.to(device), powers_of_two, shape, scheme.group, book)
    values = [
        [BOOK[c] * 2.0 ** (e[column // scheme.group] - 127) for column, c in enumerate(row)]
        for row, e in zip(code.tolist(), exponent.tolist(), strict=True)
    ]
    return matrix, torch.tensor(values, device=device)


def held(scheme: E2M1Scheme, matrix: E2M1Matrix, dtype: torch.dtype, place: tuple[slice, slice]) -> NF4Weight:
    rows, columns = place
    device = matrix.book.device
    shape = rows.stop - rows.start, columns.stop - columns.start
    weight = scheme.empty(*shape, dtype, device, Scratch(dtype, device))
    weight.fill(0, matrix, place)
    return weight


@pytest.mark.parametrize("scheme", [MXFP4, NVFP4], ids=lambda scheme: scheme.name)
@pytest.mark.parametrize(("shape", "ranks"), [((20, 192), 1), ((20, 192), 4), ((9, 160), 2), ((6, 96), 3)], ids=str)
def test_a_ranks_part_has_the_wholes_values_wherever_it_cuts_groups(
    shape: tuple[int, int], ranks: int, scheme: E2M1Scheme
) -> None:
    matrix, values = made(scheme, shape)
    assert torch.equal(matrix[...], values)
    size = shape[1] // ranks
    for rank in range(ranks):
        place = slice(1, shape[0]), slice(rank * size, (rank + 1) * size)
        weight, x = held(scheme, matrix, torch.float32, place), torch.randn(3, size)
        assert torch.equal(weight.dequantized(), values[place])
        torch.testing.assert_close(weight.linear(x, None), x @ values[place].T)


def test_every_scale_of_mxfp4_is_held_in_two_bytes() -> None:
    exponent = torch.arange(255, dtype=torch.uint8)[:, None].repeat(1, 2)
    book = e2m1_book(torch.device("cpu"))
    packed = torch.full((255, 32), 0x21, dtype=torch.uint8)
    matrix = E2M1Matrix(packed, exponent, powers_of_two, (255, 64), MXFP4.group, book)
    weight = held(MXFP4, matrix, torch.float32, (slice(0, 255), slice(0, 64)))
    assert torch.equal(weight.dequantized(), matrix[...])
    assert weight.absmax_OG.element_size() == 2


def test_values_are_quantized_to_the_nearest() -> None:
    values = torch.randn(8, 64)
    scale = values.view(8, 4, 16).abs().amax(dim=2, keepdim=True) / 6
    nearest = (values.view(8, 4, 16, 1) / scale[..., None] - torch.tensor(BOOK)).abs().argmin(dim=-1)
    torch.testing.assert_close(quantize_e2m1(values, 16)[...], (torch.tensor(BOOK)[nearest] * scale).view(8, 64))


def test_the_kernels_in_the_interpreter() -> None:
    run_interpreted(
        """
        import torch
        from lorafleet.kernels.quant import nf4_gemv_triton, nf4_triton
        from lorafleet.kernels.quant.e2m1_scheme import MXFP4, NVFP4
        from tests.kernels.quant.test_e2m1 import held, made
        for scheme in (MXFP4, NVFP4):
            matrix, values = made(scheme, (20, 192))
            weight = held(scheme, matrix, torch.float32, (slice(0, 20), slice(0, 192)))
            out = torch.full_like(values, torch.nan)
            assert torch.equal(nf4_triton.dequantize_triton(weight, out), values)
            for tokens, kernel in ((1, nf4_gemv_triton.nf4_gemv_triton), (3, nf4_triton.nf4_linear_triton)):
                x, bias = torch.randn(tokens, 192), torch.randn(20)
                torch.testing.assert_close(kernel(x, weight, bias), x @ values.T + bias, rtol=1e-4, atol=1e-4)
        """
    )


class TestOnGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("num_tokens", [1, 7, 33, 200])
    @pytest.mark.parametrize("scheme", [MXFP4, NVFP4], ids=lambda scheme: scheme.name)
    def test_products_are_those_of_the_values(self, scheme: E2M1Scheme, num_tokens: int) -> None:
        shape = 272, 512
        matrix, values = made(scheme, shape, "cuda")
        weight = held(scheme, matrix, torch.bfloat16, (slice(0, shape[0]), slice(0, shape[1])))
        assert torch.equal(weight.dequantized(), values.bfloat16())
        x = (torch.randn(num_tokens, shape[1], device="cuda") / math.sqrt(shape[1])).bfloat16()
        poison_free_memory()
        exact = x.float() @ values.T
        assert (weight.linear(x, None).float() - exact).norm() / exact.norm() < 5e-3
