from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.decoder.decoder_stack import captured
from lorafleet.kernels.decoder.scratch import Scratch
from lorafleet.kernels.nvrtc import CudaCodeError
from lorafleet.kernels.quant import four_bit_cuda
from lorafleet.kernels.quant.code_tiles import PIECES, empty_codes, put_codes, take_codes
from lorafleet.kernels.quant.int_weight import IntScheme
from lorafleet.kernels.quant.nf4 import NF4Scheme
from lorafleet.kernels.quant.tiled_weight import TiledWeight, is_tileable, tiled_weight
from lorafleet.workers.models.linear_weights import LinearWeights
from tests.kernels.harness import poison_free_memory
from tests.kernels.quant.four_bit_cases import BF16, CASES, CPU, F16, filled, random_matrix_of


@pytest.mark.parametrize("case", CASES)
def test_a_weight_is_held_with_the_values_of_the_schemes_own_weight(case: str) -> None:
    scheme, dtype = CASES[case]
    plain = scheme.empty(192, 384, dtype, CPU, Scratch(dtype, CPU))
    plain.fill(0, random_matrix_of(scheme, 192, 384), (slice(0, 192), slice(0, 384)))
    weight = filled(scheme, 192, 384, dtype)
    assert torch.equal(weight.dequantized(), plain.dequantized())
    assert torch.equal(weight.dequantized(slice(17, 90)), plain.dequantized(slice(17, 90)))
    x = torch.randn(3, 384, generator=torch.Generator().manual_seed(5)).to(dtype)
    assert torch.equal(weight.linear(x, None), plain.linear(x, None))


@pytest.mark.parametrize("case", CASES)
def test_a_ranks_part_has_the_wholes_values(case: str) -> None:
    scheme, dtype = CASES[case]
    matrix, whole = random_matrix_of(scheme, 128, 384), filled(scheme, 128, 384, dtype).dequantized()
    for place in ((slice(0, 128), slice(192, 384)), (slice(64, 128), slice(128, 256))):
        rows, columns = (part.stop - part.start for part in place)
        weight = TiledWeight(scheme, rows, columns, dtype, CPU, Scratch(dtype, CPU))
        if getattr(scheme, "group", 0) is None:
            continue  # A row's only group is not a group of a part's columns: see the next test.
        weight.fill(0, matrix, place)
        assert torch.equal(weight.dequantized(), whole[place])


def test_a_part_of_a_row_with_one_scale_has_that_scale() -> None:
    scheme, dtype = CASES["int4 with one scale for a row"]
    weight = TiledWeight(scheme, 128, 192, dtype, CPU, Scratch(dtype, CPU))
    place = slice(0, 128), slice(192, 384)
    weight.fill(0, random_matrix_of(scheme, 128, 384), place)
    assert torch.equal(weight.dequantized(), filled(scheme, 128, 384, dtype).dequantized()[place])


def first_input(step: int, t: int, runs: int) -> int:
    """Returns the first of a lane's inputs, as first_input() in four_bit.cu does."""
    return step * 16 + t * 4 if runs == 4 else step // 2 * 32 + t * 8 + step % 2 * 4


def place_of_operand(step: int, register: int, runs: int) -> int:
    """Returns which of a lane's 16 bytes a register names, as word_of() and byte_of() in code_tiles.cuh do."""
    half, pair = register % 2, register // 2
    return pair * 8 + step * 2 + half if runs == 4 else step % 2 * 8 + pair * 4 + step // 2 * 2 + half


def tensor_core_product(tiles: Tensor, x_TD: Tensor) -> Tensor:
    """Multiplies codes by x as the lanes of a warp do, with the operands' layout that PTX documents for m16n8k16."""
    y_TO, runs = torch.zeros(8, len(tiles) * 64), tiles.shape[6]
    flat = tiles.view(*tiles.shape[:3], 32, 16)  # the 16 bytes that a lane reads
    for rows, block, m in ((r, c, m) for r in range(flat.shape[0]) for c in range(flat.shape[1]) for m in range(4)):
        for step in range(4):
            a, b = torch.zeros(16, 16), torch.zeros(16, 8)
            for lane in range(32):
                g, t = lane // 4, lane % 4
                x = x_TD[g, block * 64 + first_input(step, t, runs) :][:4]  # four inputs in a row
                for register, (row, k) in enumerate(((g, 2 * t), (g + 8, 2 * t), (g, 2 * t + 8), (g + 8, 2 * t + 8))):
                    byte = int(flat[rows, block, m, PIECES[g, t], place_of_operand(step, register, runs)])
                    a[row, k], a[row, k + 1] = byte & 15, byte >> 4
                b[2 * t, g], b[2 * t + 1, g], b[2 * t + 8, g], b[2 * t + 9, g] = x
            y_TO[:, rows * 64 + m * 16 :][:, :16] += (a @ b).T
    return y_TO


@pytest.mark.parametrize("group", [16, 32])
def test_codes_lie_as_the_tensor_cores_read_them(group: int) -> None:
    generator = torch.Generator().manual_seed(1)
    code = torch.randint(0, 16, (128, 128), generator=generator, dtype=torch.uint8)
    tiles = torch.zeros(empty_codes(128, 128, group), dtype=torch.uint8)
    for first, end in ((0, 10), (10, 70), (70, 128)):
        put_codes(tiles, first, code[first:end])
    assert torch.equal(take_codes(tiles, slice(None)), code)
    x = torch.randint(-3, 4, (8, 128), generator=generator).float()
    assert torch.equal(tensor_core_product(tiles, x), x @ code.float().T)


@pytest.mark.parametrize(
    ("scheme", "outputs", "inputs", "dtype"),
    [
        (NF4Scheme(), 96, 128, BF16),
        (NF4Scheme(), 64, 96, BF16),
        (NF4Scheme(), 64, 128, torch.float32),
        (IntScheme(8, 64), 64, 128, BF16),
        (IntScheme(4, 64, False, 2), 64, 128, BF16),
        (IntScheme(4, 16), 64, 128, BF16),
    ],
    ids=["rows", "columns", "dtype", "bits", "order", "groups"],
)
def test_what_the_kernels_do_not_serve_is_left_to_the_schemes_own_weight(
    scheme: NF4Scheme | IntScheme, outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    assert is_tileable(NF4Scheme(), 64, 128, BF16)
    assert not is_tileable(scheme, outputs, inputs, dtype)


def test_a_cpu_is_served_by_the_schemes_own_weight() -> None:
    assert tiled_weight(NF4Scheme(), 64, 64, BF16, CPU, Scratch(BF16, CPU)) is None
    assert type(LinearWeights(BF16, CPU).empty(NF4Scheme(), 64, 64, BF16)).__name__ == "NF4Weight"


class TestOnTheGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("case", CASES)
    def test_products_are_those_of_the_values(self, case: str) -> None:
        scheme, dtype = CASES[case]
        device, generator = torch.device("cuda"), torch.Generator().manual_seed(6)
        for outputs, inputs in ((64, 128), (192, 384), (1088, 4224), (6144, 4096), (320, 14336)):
            weight = filled(scheme, outputs, inputs, dtype, device)
            assert tiled_weight(scheme, outputs, inputs, dtype, device, Scratch(dtype, device)) is not None
            on_cpu = filled(scheme, outputs, inputs, dtype)
            assert torch.equal(weight.dequantized().cpu(), on_cpu.dequantized())
            assert torch.equal(weight.dequantized(slice(5, 60)).cpu(), on_cpu.dequantized(slice(5, 60)))
            values = weight.dequantized().double()
            bias = torch.randn(outputs, generator=generator).to(device, dtype) * math.sqrt(inputs)
            kernels = four_bit_cuda.four_bit_kernels(weight.variant, device)
            assert kernels is not None
            most = kernels.most_tokens
            for tokens in (
                *range(1, 18),
                31,
                32,
                33,
                47,
                63,
                64,
                65,
                100,
                128,
                129,
                256,
                257,
                most - 1,
                most,
                most + 1,
            ):
                x = torch.randn(tokens, inputs, generator=generator).to(device, dtype)
                for own_bias in (None, bias):
                    poison_free_memory()
                    want = x.double() @ values.T + (0 if own_bias is None else own_bias.double())
                    y = weight.linear(x, own_bias)
                    assert (y.double() - want).norm() < 0.005 * want.norm(), (outputs, inputs, tokens)
                    assert torch.equal(y, weight.linear(x, own_bias))  # never depends on timing
            assert not weight.tickets.any()

    @pytest.mark.parametrize("tokens", [1, 16, 32, 64, 100, 300])
    def test_a_captured_product_reads_what_x_has_at_its_replay(self, tokens: int) -> None:
        weight = filled(NF4Scheme(), 512, 1024, F16, torch.device("cuda"))
        x, y = (torch.zeros(tokens, size, dtype=F16, device="cuda") for size in (1024, 512))
        graph = captured(lambda: y.copy_(weight.linear(x, None)))
        for seed in range(3):
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
            graph.replay()
            assert torch.equal(y, weight.linear(x, None))

    def test_a_machine_that_cannot_compile_is_served_by_triton(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(*_arguments: object) -> bytes:
            raise CudaCodeError("libnvrtc.so.13 cannot be loaded")

        monkeypatch.setattr(four_bit_cuda, "machine_code", fail)
        four_bit_cuda._kernels.cache_clear()
        try:
            weights = LinearWeights(BF16, torch.device("cuda"))
            kinds = {type(weights.empty(NF4Scheme(), 64, 128, BF16)).__name__ for _ in range(2)}
        finally:
            four_bit_cuda._kernels.cache_clear()
        assert kinds == {"NF4Weight"}
        assert [record.getMessage() for record in caplog.records] == [
            "weights of four bits are served by slower kernels: libnvrtc.so.13 cannot be loaded"
        ]
