from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.decoder.scratch import Scratch
from lorafleet.kernels.quant.e4m3_pairs import joined, split_pairs
from lorafleet.kernels.quant.fp8 import FP8, FP8_MAX
from lorafleet.kernels.quant.scaled_matrix import ScaledMatrix, num_blocks, quantize_rows
from lorafleet.kernels.quant.scaled_weight import FUSED_TOKENS, ScaledScheme, ScaledWeight
from tests.kernels.harness import poison_free_memory, run_interpreted

# How scales are stored: one for all numbers, one for each row, one for 128 x 128 numbers.
BLOCKS = {"tensor": (1 << 20, 1 << 20), "row": (1, 1 << 20), "block": (128, 128)}


def held(
    matrix: ScaledMatrix, dtype: torch.dtype, place: tuple[slice, slice] | None = None, rounds_x: bool = True
) -> ScaledWeight:
    rows, columns = place = place or (slice(0, matrix.shape[0]), slice(0, matrix.shape[1]))
    block = matrix.block[1] if matrix.block[1] < matrix.shape[1] else None
    device = matrix.scale_RC.device
    shape, scratch = (rows.stop - rows.start, columns.stop - columns.start), Scratch(dtype, device)
    scheme = ScaledScheme("fp8", matrix.code[place].dtype, block, rounds_x)
    weight = scheme.empty(*shape, dtype, device, scratch)
    weight.fill(0, matrix, place)
    return weight


def made(
    shape: tuple[int, int], kind: str, code_dtype: torch.dtype, device: str = "cpu"
) -> tuple[ScaledMatrix, Tensor]:
    """Returns a matrix and its values, float32, which are computed block by block."""
    block = min(BLOCKS[kind][0], shape[0]), min(BLOCKS[kind][1], shape[1])
    code = torch.randint(-127, 128, shape, device=device).to(torch.int8)
    if code_dtype == FP8:
        code = (torch.randn(shape, device=device) * 100).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    scale = (torch.rand(num_blocks(shape, block), device=device) + 0.5) / (100 * math.sqrt(shape[1]))
    values = torch.empty(shape, device=device)
    for r, c in torch.cartesian_prod(*map(torch.arange, scale.shape)).view(-1, 2).tolist():
        at = slice(r * block[0], (r + 1) * block[0]), slice(c * block[1], (c + 1) * block[1])
        values[at] = code[at].float() * scale[r, c]
    return ScaledMatrix(code, scale, shape, block), values


def rounded(values_OD: Tensor) -> Tensor:
    """In float32, each row's largest magnitude made e4m3's."""
    scale_O1 = values_OD.float().abs().amax(dim=1, keepdim=True) * (1 / FP8_MAX)
    return (values_OD.float() / scale_O1).to(FP8).float() * scale_O1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_weight_is_rounded_row_by_row(dtype: torch.dtype) -> None:
    values = (torch.randn(24, 40) * torch.logspace(-3, 3, 24)[:, None]).to(dtype)
    weight = held(quantize_rows(values), dtype)
    assert torch.equal(weight.dequantized(), rounded(values).to(dtype))
    assert torch.equal(weight.dequantized(slice(3, 9)), rounded(values)[3:9].to(dtype))


def test_a_row_of_zeros_stays_zero() -> None:
    assert not held(quantize_rows(torch.zeros(2, 64)), torch.float32).dequantized().any()


@pytest.mark.parametrize("code_dtype", [FP8, torch.int8], ids=str)
@pytest.mark.parametrize("kind", list(BLOCKS))
@pytest.mark.parametrize(("shape", "ranks"), [((200, 320), 4), ((130, 264), 3), ((256, 256), 1)], ids=str)
def test_a_ranks_part_has_the_wholes_values_wherever_it_cuts_blocks(
    shape: tuple[int, int], ranks: int, kind: str, code_dtype: torch.dtype
) -> None:
    matrix, values = made(shape, kind, code_dtype)
    assert torch.equal(matrix[...], values)
    x, bias, size = torch.randn(5, shape[1]), torch.randn(shape[0] - 7), shape[1] // ranks
    for rank in range(ranks):
        place = slice(3, shape[0] - 4), slice(rank * size, (rank + 1) * size)
        weight, own_x = held(matrix, torch.float32, place), x[:, place[1]].contiguous()
        assert torch.equal(weight.dequantized(), values[place])
        want = own_x @ values[place].T + bias
        torch.testing.assert_close(weight.linear(own_x, bias), want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(weight.add_linear(bias.repeat(5, 1), own_x), want, rtol=1e-5, atol=1e-5)


def test_a_block_of_scales_costs_little_where_ranks_do_not_cut_it() -> None:
    matrix, _ = made((256, 512), "block", FP8)
    assert sum(p.nbytes for p in held(matrix, torch.float32).parameters()) == 256 * 512 + 4 * 256 * 512 // 128


def test_the_kernels_in_the_interpreter() -> None:
    """int8 codes, and e4m3 numbers as float32, which the interpreter knows."""
    run_interpreted(
        """
        import torch
        from lorafleet.kernels.lora import split_sum_triton
        from lorafleet.kernels.quant import scaled_linear_triton as kernels
        kernels.CODE_DTYPES = (torch.float32, torch.int8)
        for programs in (1, 64):
            split_sum_triton.PROGRAMS = programs
            cases = ((1, (70, 1024), 1, True), (19, (64, 1088), 1, False), (3, (20, 96), 1, True),
                     (2, (70, 1024), 8, True), (18, (40, 192), 3, False), (1, (20, 96), 6, True))
            for tokens, (outputs, inputs), groups, has_bias in cases:
                for dtype in kernels.CODE_DTYPES:
                    code = (torch.randn(outputs, inputs) * 40).round().clamp(-128, 127).to(dtype)
                    x, scale = torch.randn(tokens, inputs), torch.rand(outputs, groups) / 40
                    values = code.float() * scale.repeat_interleave(inputs // groups, dim=1)
                    bias = torch.randn(outputs) if has_bias else None
                    torch.testing.assert_close(
                        kernels.scaled_linear_triton(x, code, scale, bias),
                        torch.nn.functional.linear(x, values, bias), rtol=1e-4, atol=1e-4)
                    if programs == 1:
                        out = torch.full((outputs, inputs), torch.nan)
                        assert torch.equal(kernels.dequantize_codes_triton(code, scale, out), values)
        """
    )


class TestOnGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("num_tokens", [1, 7, 16, 17, 33, 64, 100, FUSED_TOKENS + 1, 300])
    @pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336), (272, 192), (50, 36)], ids=str)
    def test_products_are_those_of_the_values(self, shape: tuple[int, int], num_tokens: int) -> None:
        """With the rounding of activations, where there are many tokens."""
        values = (torch.randn(shape, device="cuda") / math.sqrt(shape[1])).bfloat16()
        self.assert_products(held(quantize_rows(values), torch.bfloat16), rounded(values), num_tokens)

    @pytest.mark.parametrize("num_tokens", [1, 16, 33, 100, FUSED_TOKENS + 1])
    @pytest.mark.parametrize("rounds_x", [False, True])
    @pytest.mark.parametrize("kind", list(BLOCKS))
    @pytest.mark.parametrize("shape", [(1536, 4096), (272, 192), (50, 36)], ids=str)
    def test_e4m3_with_any_scales(self, shape: tuple[int, int], kind: str, rounds_x: bool, num_tokens: int) -> None:
        matrix, values = made(shape, kind, FP8, "cuda")
        weight = held(matrix, torch.bfloat16, rounds_x=rounds_x)
        assert torch.equal(weight.dequantized(), values.bfloat16())
        if not rounds_x:
            assert not weight.rounds(num_tokens)
        self.assert_products(weight, values, num_tokens)

    @pytest.mark.parametrize("num_tokens", [1, 16, 33, FUSED_TOKENS + 1])
    @pytest.mark.parametrize("kind", ["row", "block"])
    @pytest.mark.parametrize("shape", [(1536, 4096), (272, 192), (50, 36)], ids=str)
    def test_int8_codes_never_round_the_tokens(self, shape: tuple[int, int], kind: str, num_tokens: int) -> None:
        matrix, values = made(shape, kind, torch.int8, "cuda")
        weight = held(matrix, torch.bfloat16)
        assert torch.equal(weight.dequantized(), values.bfloat16()) and not weight.rounds(num_tokens)
        self.assert_products(weight, values, num_tokens)

    @staticmethod
    def assert_products(weight: ScaledWeight, values: Tensor, num_tokens: int) -> None:
        inputs = values.shape[1]
        x, bias = (torch.randn(n, device="cuda").bfloat16() for n in ((num_tokens, inputs), (len(values),)))
        poison_free_memory()
        multiplied = x.float()
        if weight.rounds(num_tokens):
            multiplied = rounded(x)
            if num_tokens <= weight.pair_tokens:
                multiplied = joined(split_pairs(x, rounds_x=True))
        exact = multiplied @ values.T + bias.float()
        for got in (weight.linear(x, bias), weight.add_linear(bias.repeat(num_tokens, 1), x)):
            assert (got.float() - exact).norm() / exact.norm() < 5e-3

    def test_tokens_are_rounded_as_rows_of_a_weight_are(self) -> None:
        from lorafleet.kernels.quant.scaled_linear_triton import quantize_tokens_triton

        for size in (64, 4096, 14336, 600):
            x = torch.randn(5, size, device="cuda").bfloat16()
            x[3] = 0
            codes, scale = quantize_tokens_triton(x)
            want = quantize_rows(x)
            assert torch.equal(scale, want.scale_RC[:, 0])
            assert torch.equal(codes.float(), want.code[:, :].float())
