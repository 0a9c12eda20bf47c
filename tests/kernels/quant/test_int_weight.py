from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.decoder.scratch import Scratch
from lorafleet.kernels.quant.int_weight import FUSED_TOKENS, Bits, IntMatrix, IntScheme, IntWeight, round_to_nearest
from tests.kernels.harness import poison_free_memory, run_interpreted

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random_matrix(
    shape: tuple[int, int],
    bits: Bits,
    group: int,
    *,
    symmetric: bool = False,
    ordered: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    seed: int = 1,
) -> IntMatrix:
    outputs, inputs = shape
    generator = torch.Generator().manual_seed(seed)
    code, zero = (
        torch.randint(0, 1 << bits, size, generator=generator, dtype=torch.uint8).to(device)
        for size in (shape, (outputs, inputs // group))
    )
    scale = (torch.rand(zero.shape, generator=generator) / (1 << bits) / math.sqrt(inputs)).to(device, dtype)
    group_D = torch.arange(inputs) // group
    if ordered:
        group_D = group_D[torch.randperm(inputs, generator=generator)]
    return IntMatrix(code, scale, None if symmetric else zero, group_D.to(device), bits)


def held(
    matrix: IntMatrix, group: int, dtype: torch.dtype = torch.float32, place: tuple[slice, slice] | None = None
) -> IntWeight:
    """Holds the matrix, or a part of it."""
    is_run = torch.equal(matrix.group_D, matrix.group_D.sort().values)
    groups = 0 if is_run else matrix.scale_OG.shape[1]
    scheme = IntScheme(matrix.bits, group, matrix.zero_OG is not None, groups, matrix.scale_OG.dtype)
    rows, columns = place = place or (slice(0, len(matrix.code_OD)), slice(0, matrix.code_OD.shape[1]))
    outputs, inputs, device = rows.stop - rows.start, columns.stop - columns.start, matrix.code_OD.device
    weight = scheme.empty(outputs, inputs, dtype, device, Scratch(dtype, device))
    weight.fill(0, matrix, place)
    return weight


def reference(matrix: IntMatrix) -> Tensor:
    """Each number is its code minus its group's zero, times its group's scale."""
    rows = []
    for code_D, scale_G, zero_G in zip(matrix.code_OD, matrix.scale_OG, matrix.zeros(), strict=True):
        row = [
            (float(code) - float(zero_G[group])) * float(scale_G[group])
            for code, group in zip(code_D, matrix.group_D.tolist(), strict=True)
        ]
        rows.append(torch.tensor(row, dtype=torch.float64))
    return torch.stack(rows).to(matrix.scale_OG.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", [{}, {"symmetric": True}, {"ordered": True}], ids=str)
def test_a_weight_is_held_with_its_values(bits: Bits, dtype: torch.dtype, kind: dict[str, bool]) -> None:
    for shape, group in (((6, 96), 32), ((3, 40), 8), ((4, 48), 48)):
        matrix = random_matrix(shape, bits, group, dtype=dtype, **kind)
        want, weight = reference(matrix), held(matrix, group, dtype)
        assert torch.equal(matrix.values(), want)
        assert torch.equal(weight.dequantized(), want)
        assert torch.equal(weight.dequantized(slice(1, 3)), want[1:3])
        for columns in (slice(0, shape[1] // 2), slice(shape[1] // 2, shape[1])):
            part = held(matrix, group, dtype, (slice(1, 3), columns))
            assert torch.equal(part.dequantized(), want[1:3, columns])


def test_projections_with_other_bits_and_orders_share_a_weight() -> None:
    parts = [
        random_matrix((4, 64), bits, group, ordered=True, seed=seed) for seed, bits, group in ((1, 4, 32), (2, 8, 16))
    ]
    first, second = (IntScheme(m.bits, 32 // m.bits * 4, True, m.scale_OG.shape[1], torch.float32) for m in parts)
    scheme = first.common(second)
    assert scheme is not None
    weight = scheme.empty(8, 64, torch.float32, CPU, Scratch(torch.float32, CPU))
    for row, matrix in zip((0, 4), parts, strict=True):
        weight.fill(row, matrix, (slice(0, 4), slice(0, 64)))
    assert torch.equal(weight.dequantized(), torch.cat([reference(matrix) for matrix in parts]))
    assert first.common(IntScheme(4, 32, True, 0, torch.float32)) is None
    assert first.common(IntScheme(4, 32, True, 2, torch.float16)) is None


def test_it_holds_half_a_byte_a_number_and_four_bytes_a_group() -> None:
    weight = held(round_to_nearest(torch.randn(64, 256), 4, 128), 128)
    assert sum(p.nbytes for p in weight.parameters()) == 64 * 256 // 2 + 4 * 64 * 256 // 128


def test_rounding_covers_the_largest_magnitude_and_zeros() -> None:
    values = torch.randn(8, 256)
    matrix = round_to_nearest(values, 4, 128)
    largest = values.unflatten(1, (2, 128)).abs().amax(dim=2).repeat_interleave(128, dim=1)
    assert ((matrix.values() - values).abs() <= largest / 15 + 1e-6).all()
    assert not round_to_nearest(torch.zeros(2, 64).half(), 4, 128).values().any()


def test_products_are_those_of_the_values() -> None:
    weight, x, bias = held(random_matrix((48, 64), 4, 32), 32), torch.randn(5, 64), torch.randn(48)
    want = x @ weight.dequantized().T
    torch.testing.assert_close(weight.linear(x, bias), want + bias)
    torch.testing.assert_close(weight.add_linear(bias.repeat(5, 1), x), want + bias)


def test_the_kernels_in_the_interpreter() -> None:
    run_interpreted(
        """
        from lorafleet.kernels.lora import split_sum_triton
        from lorafleet.kernels.quant.int_triton import dequantize_int_triton, int_linear_triton
        from tests.kernels.quant.test_int_weight import held, random_matrix
        for programs in (1, 64):
            split_sum_triton.PROGRAMS = programs
            cases = (
                (1, (70, 512), 4, 128, {}),
                (19, (20, 1024), 4, 64, {"symmetric": True}),
                (3, (20, 96), 8, 32, {}),
                (5, (40, 192), 4, 48, {"symmetric": True}),
                (2, (21, 256), 4, 32, {"ordered": True}),
                (17, (21, 256), 8, 256, {"symmetric": True}),
                (1, (7, 192), 8, 64, {"ordered": True, "symmetric": True}),
            )
            for tokens, shape, bits, group, kind in cases:
                weight = held(random_matrix(shape, bits, group, **kind), group)
                want = weight.dequantized()
                x, bias = torch.randn(tokens, shape[1]), torch.randn(shape[0]) if bits == 4 else None
                out = torch.full_like(want, torch.nan)
                assert torch.equal(dequantize_int_triton(weight, out), want)
                assert torch.equal(dequantize_int_triton(weight, out[:4], 3), want[3:7])
                torch.testing.assert_close(
                    int_linear_triton(x, weight, bias),
                    torch.nn.functional.linear(x, want, bias), rtol=1e-4, atol=1e-4)
        """
    )


@pytest.mark.parametrize("num_tokens", [1, 16, 33, 128, FUSED_TOKENS + 1])
@pytest.mark.parametrize("kind", [{}, {"symmetric": True}, {"ordered": True}], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
class TestOnGPU:
    pytestmark = pytest.mark.gpu

    def test_products_are_those_of_the_values(self, bits: Bits, kind: dict[str, bool], num_tokens: int) -> None:
        device = torch.device("cuda")
        for shape, group in (((4096, 4096), 128), ((272, 192), 32)):
            matrix = random_matrix(shape, bits, group, dtype=torch.float16, device=device, **kind)
            weight, want = held(matrix, group, torch.bfloat16), matrix.values().bfloat16()
            assert torch.equal(weight.dequantized(), want)
            x, bias = (torch.randn(n, device=device).bfloat16() for n in ((num_tokens, shape[1]), (shape[0],)))
            poison_free_memory()
            exact = x.float() @ want.float().T + bias.float()
            for got in (weight.linear(x, bias), weight.add_linear(bias.repeat(num_tokens, 1), x)):
                assert (got.float() - exact).norm() / exact.norm() < 5e-3
