from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.decoder.scratch import Scratch
from lorafleet.kernels.quant.nf4 import BLOCK, FUSED_TOKENS, NF4_BOOK, NF4Matrix, NF4Weight, quantize
from tests.kernels.harness import poison_free_memory, run_interpreted

CPU = torch.device("cpu")
# Rows that are whole blocks, several to a block, and with blocks that end amid rows.
SHAPES = [(48, 256), (40, 32), (33, 66), (7, 24)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def held(
    values_OD: Tensor, place: tuple[slice, slice] | None = None, dtype: torch.dtype | None = None
) -> tuple[NF4Weight, NF4Matrix]:
    matrix = quantize(values_OD)
    rows, columns = place = place or (slice(0, len(values_OD)), slice(0, values_OD.shape[1]))
    dtype, device = dtype or values_OD.dtype, values_OD.device
    outputs, inputs = rows.stop - rows.start, columns.stop - columns.start
    weight = NF4Weight(outputs, inputs, dtype, device, Scratch(dtype, device))
    weight.fill(0, matrix, place)
    return weight, matrix


def reference(values_OD: Tensor) -> Tensor:
    """Each number becomes the nearest of the book's, times its block's largest magnitude."""
    blocks = values_OD.float().flatten().split(BLOCK)
    book = torch.tensor(NF4_BOOK)
    found = [book[(b[:, None] / b.abs().max() - book).abs().argmin(dim=1)] * b.abs().max() for b in blocks]
    return torch.cat(found).view(values_OD.shape).to(values_OD.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_weight_is_held_with_the_values_of_the_method(shape: tuple[int, int], dtype: torch.dtype) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight, matrix = held(values)
    assert torch.equal(matrix[...], reference(values))
    assert torch.equal(weight.dequantized(), reference(values))
    assert torch.equal(weight.dequantized(slice(2, 5)), reference(values)[2:5])


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_codes_and_values_are_those_of_bitsandbytes(shape: tuple[int, int]) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    packed, state = functional.quantize_4bit(values, quant_type="nf4")
    matrix = quantize(values)
    packed = packed.flatten()
    assert torch.equal(torch.stack([packed >> 4, packed & 15], dim=1).view(shape), matrix.code)
    assert torch.equal(state.absmax, matrix.absmax_B)
    assert torch.equal(state.code, matrix.book)


def test_a_block_of_zeros_stays_zero() -> None:
    assert not held(torch.zeros(2, 64))[0].dequantized().any()


@pytest.mark.parametrize(("shape", "ranks"), [((48, 256), 4), ((40, 96), 2), ((33, 72), 3), ((8, 68), 2)], ids=str)
def test_a_ranks_part_has_the_wholes_values(shape: tuple[int, int], ranks: int) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    whole = reference(values)
    size = shape[1] // ranks
    for rank in range(ranks):
        place = slice(1, shape[0] - 1), slice(rank * size, (rank + 1) * size)
        assert torch.equal(held(values, place)[0].dequantized(), whole[place])


def test_values_are_rounded_to_what_was_quantized_before_what_is_served() -> None:
    values = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(held(values, dtype=torch.float32)[0].dequantized(), reference(values).float())


def test_it_holds_half_a_byte_a_number_and_four_bytes_a_block() -> None:
    weight, _ = held(torch.randn(64, 256))
    numbers = 64 * 256
    assert sum(p.nbytes for p in weight.parameters()) == numbers // 2 + 4 * numbers // 64 + 4 * 16


def test_products_are_those_of_the_values() -> None:
    values, x, bias = torch.randn(48, 64), torch.randn(5, 64), torch.randn(48)
    weight, _ = held(values)
    want = x @ weight.dequantized().T
    torch.testing.assert_close(weight.linear(x, bias), want + bias)
    torch.testing.assert_close(weight.add_linear(bias.repeat(5, 1), x), want + bias)


def test_the_kernels_in_the_interpreter() -> None:
    run_interpreted(
        """
        import torch
        from lorafleet.kernels.lora import split_sum_triton
        from lorafleet.kernels.quant import nf4_gemv_triton, nf4_triton
        from tests.kernels.quant.test_nf4 import held
        for programs in (1, 64):
            split_sum_triton.PROGRAMS = programs
            cases = ((1, (70, 512), True), (19, (64, 1024), False), (3, (20, 96), True), (1, (21, 2048), False))
            for tokens, (outputs, inputs), has_bias in cases:
                values = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1))
                weight, _ = held(values)
                want = weight.dequantized()
                x, bias = torch.randn(tokens, inputs), torch.randn(outputs) if has_bias else None
                out = torch.full_like(want, torch.nan)
                assert torch.equal(nf4_triton.dequantize_triton(weight, out), want)
                assert torch.equal(nf4_triton.dequantize_triton(weight, out[:7], 3), want[3:10])
                if tokens == 1:
                    torch.testing.assert_close(
                        nf4_gemv_triton.nf4_gemv_triton(x, weight, bias),
                        torch.nn.functional.linear(x, want, bias), rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(
                    nf4_triton.nf4_linear_triton(x, weight, bias),
                    torch.nn.functional.linear(x, want, bias), rtol=1e-4, atol=1e-4)
        """
    )


class TestOnGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("num_tokens", [1, 2, 7, 16, 33, 128, FUSED_TOKENS + 1])
    @pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336), (272, 192), (48, 32)], ids=str)
    def test_products_are_those_of_the_values(
        self, shape: tuple[int, int], num_tokens: int, dtype: torch.dtype
    ) -> None:
        values = (torch.randn(shape, device="cuda") / math.sqrt(shape[1])).to(dtype)
        weight, matrix = held(values)
        want = matrix[...]
        assert torch.equal(weight.dequantized(), want)
        x, bias = (torch.randn(n, device="cuda", dtype=dtype) for n in ((num_tokens, shape[1]), (shape[0],)))
        poison_free_memory()
        exact = x.float() @ want.float().T + bias.float()
        for got in (weight.linear(x, bias), weight.add_linear(bias.repeat(num_tokens, 1), x)):
            assert (got.float() - exact).norm() / exact.norm() < (5e-3 if dtype == torch.bfloat16 else 1e-3)
        assert torch.equal(weight.linear(x, bias), weight.linear(x, bias))

    def test_values_written_for_cublas_are_the_same(self) -> None:
        from lorafleet.kernels.quant.nf4_triton import dequantize_triton

        for shape in SHAPES:
            weight, matrix = held(torch.randn(shape, device="cuda").bfloat16())
            out = torch.full(shape, torch.nan, device="cuda", dtype=torch.bfloat16)
            assert torch.equal(dequantize_triton(weight, out), matrix[...])
            assert torch.equal(weight.dequantized(slice(3, 6)), matrix[slice(3, 6), slice(0, shape[1])])
