"""Experts with codes of four bits: the CUDA kernels, emulated on this CPU, against a loop over the pairs."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from lorafleet.kernels.decoder.decoder_stack import captured
from lorafleet.kernels.moe.expert_codes import ExpertCodes, is_tiled
from lorafleet.kernels.moe.moe_codes_cuda import launch_tiles, tiled_experts_linear
from lorafleet.kernels.moe.moe_tiles_triton import ExpertTiles, make_tiles
from lorafleet.kernels.quant.base_weight import Scheme
from lorafleet.kernels.quant.nf4 import NF4Scheme
from lorafleet.kernels.quant.tiled_weight import TiledWeight
from tests.kernels.harness import poison_free_memory, run_interpreted
from tests.kernels.quant.four_bit_cases import CASES, filled, random_matrix_of
from tests.kernels.quant.test_four_bit_source import EMULATED, compiled, emulated_kernels

EXPERTS, OUTPUTS, INPUTS, PER_TOKEN = 4, 192, 320, 2
# Pairs of a tile, tokens, whether a row of x has one pair, programs and most_idle: items that programs share, whole
# ones, and programs without work.
LAUNCHES = (
    (8, 13, False, 3, 0),
    (8, 13, False, 4, None),
    (8, 1, True, 7, 0),
    (16, 21, False, 2, 0),
    (32, 40, True, 4, None),
    (64, 57, False, 2, 0),
    (128, 100, False, 3, 0),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


def tiles_of(expert_N: Tensor, tile_pairs: int) -> ExpertTiles:
    """Returns the tiles that moe_tiles_triton makes, of which the last ones are not used."""
    rows = []
    for expert in expert_N.unique().tolist():
        rows += [(expert, pairs) for pairs in (expert_N == expert).nonzero().flatten().split(tile_pairs)]
    count = len(rows) + 2
    expert_M, pair_MB = torch.full((count,), -1), torch.full((count, tile_pairs), -1)
    pair_MB[len(rows) :] = 1 << 30  # memory that nothing has written
    for tile, (expert, pairs) in enumerate(rows):
        expert_M[tile], pair_MB[tile, : len(pairs)] = expert, pairs
    return ExpertTiles(expert_M.int(), pair_MB.int(), torch.tensor([len(rows)], dtype=torch.int32))


def experts_of(case: str) -> ExpertCodes:
    scheme, dtype = CASES[case]
    experts = ExpertCodes(scheme, (EXPERTS, OUTPUTS, INPUTS), dtype, torch.device("cpu"))
    weight = filled(scheme, EXPERTS * OUTPUTS, INPUTS, dtype, of_experts=True)
    experts.weight = weight
    return experts


def test_interpreted_tiles_are_the_same_by_one_launch_and_by_two() -> None:
    run_interpreted("""
        import torch
        from lorafleet.kernels.moe import moe_tiles_triton
        from tests.kernels.moe.test_tiled_experts import tiles_of

        generator = torch.Generator().manual_seed(0)
        for pairs_a_time in (64, 16):
            moe_tiles_triton.FEW = pairs_a_time, 1
            for tokens, per_token, experts, tile_pairs in ((3, 2, 3, 8), (20, 3, 8, 8), (7, 4, 128, 16), (16, 4, 5, 2)):
                expert_TK = torch.rand(tokens, experts - 1, generator=generator).argsort()[:, :per_token].int()
                found = moe_tiles_triton.make_tiles(expert_TK.contiguous(), experts, tile_pairs)
                wanted, used = tiles_of(expert_TK.flatten(), tile_pairs), int(found.used_1)
                assert used == int(wanted.used_1)
                assert torch.equal(found.expert_M[:used], wanted.expert_M[:used])
                assert set(found.expert_M[used:].tolist()) <= {-1}
                assert torch.equal(found.pair_MB[:used], wanted.pair_MB[:used])
    """)


def test_each_pair_of_two_tokens_is_a_tile() -> None:
    for expert_TK in (torch.tensor([[5, 0, 2]]), torch.tensor([[1, 0], [3, 1]])):
        tiles = make_tiles(expert_TK.int(), 6, 8)
        assert tiles.expert_M.tolist() == expert_TK.flatten().tolist()
        assert tiles.pair_MB.tolist() == [[pair, *[-1] * 7] for pair in range(expert_TK.numel())]
        assert tiles.used_1.tolist() == [expert_TK.numel()]


@pytest.mark.parametrize("case", EMULATED)
def test_tiles_of_pairs_are_multiplied_by_their_experts(case: str, folder: Path) -> None:
    experts, generator = experts_of(case), torch.Generator().manual_seed(8)
    assert isinstance(experts.weight, TiledWeight)
    library = compiled(experts.weight, folder)
    values_EOD = torch.stack([experts[expert].double() for expert in range(EXPERTS)])
    for tile_pairs, tokens, by_pair, programs, most_idle in LAUNCHES:
        kernels = emulated_kernels(library, programs, experts.weight, most_idle)
        # Half of the tokens choose the first expert, and none chooses the third.
        expert_N = torch.tensor([0, 1, 3])[torch.randint(0, 3, (tokens * PER_TOKEN,), generator=generator)]
        expert_N[: tokens // 2] = 0
        x = torch.randn(tokens * (PER_TOKEN if by_pair else 1), INPUTS, generator=generator).to(experts.weight.dtype)
        y_NO = launch_tiles(x, experts, tiles_of(expert_N, tile_pairs), len(expert_N), kernels)
        want_NO = looped(x, expert_N, values_EOD)
        assert (y_NO.double() - want_NO).norm() < 0.004 * want_NO.norm(), (tile_pairs, tokens)
        assert not experts.weight.tickets.any()


def test_interpreted_products_of_long_prompts_are_those_of_the_values() -> None:
    run_interpreted("""
        import torch
        from lorafleet.kernels.moe import expert_codes, moe_triton
        from tests.kernels.moe.test_tiled_experts import experts_of, looped

        experts = experts_of("int4 with zeros, groups of 32")
        count, outputs, inputs = experts.shape
        shape = moe_triton._Shape(16, moe_triton._Gemm(64, 64, 1, 1))
        moe_triton._TILED_SHAPES = (1, moe_triton._Shape(16, None)), (float("inf"), shape)
        expert_TK = torch.tensor([[0, 3], [3, 0], [1, 0], [0, 1], [3, 1], [0, 3]], dtype=torch.int32)
        x = torch.randn(len(expert_TK), inputs).half()
        pairs = moe_triton.PairTiles.of(expert_TK, count, True, None)
        want_NO = looped(x, expert_TK.flatten(), torch.stack([experts[expert].double() for expert in range(count)]))
        for expert_codes.MOST_WRITTEN in (3 * outputs * inputs, 1, 1 << 27):
            y_NO = pairs.linear(x, experts).y_NO
            assert (y_NO.double() - want_NO).norm() < 0.002 * want_NO.norm()
    """)


def fill(experts: ExpertCodes, scheme: Scheme) -> None:
    count, outputs, inputs = experts.shape
    matrix = random_matrix_of(scheme, count * outputs, inputs)
    experts.weight.fill(0, matrix, (slice(0, count * outputs), slice(0, inputs)))


def looped(x: Tensor, expert_N: Tensor, values_EOD: Tensor) -> Tensor:
    """Returns the product of each pair in float64."""
    x_ND = x.double().repeat_interleave(len(expert_N) // len(x), dim=0)
    out_NO = x_ND.new_zeros(len(expert_N), values_EOD.shape[1])
    for expert in expert_N.unique().tolist():
        out_NO[expert_N == expert] = x_ND[expert_N == expert] @ values_EOD[expert].T
    return out_NO


class TestOnTheGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("case", CASES)
    def test_products_are_those_of_the_values(self, case: str) -> None:
        scheme, dtype = CASES[case]
        generator = torch.Generator("cuda").manual_seed(6)
        for count, outputs, inputs in ((4, 192, 384), (60, 1088, 640), (4, 1536, 2048)):
            experts = ExpertCodes(scheme, (count, outputs, inputs), dtype, torch.device("cuda"))
            assert is_tiled(experts)
            fill(experts, scheme)
            values_EOD = torch.stack([experts[expert] for expert in range(count)]).double()
            for tile_pairs, tokens in product((8, 16, 32, 64, 128), (1, 5, 64, 300)):
                expert_TK = torch.randint(0, count, (tokens, 3), generator=generator, device="cuda").int()
                expert_TK[: tokens // 2, 0] = 0
                expert_TK[expert_TK == 2] = 1  # nobody's expert
                tiles = make_tiles(expert_TK, count, tile_pairs)
                for rows in (tokens, 3 * tokens):
                    x = torch.randn(rows, inputs, generator=generator, device="cuda").to(dtype)
                    want_NO = looped(x, expert_TK.flatten(), values_EOD)
                    poison_free_memory()
                    y_NO = tiled_experts_linear(x, experts, tiles, 3 * tokens)
                    assert (y_NO.double() - want_NO).norm() < 0.005 * want_NO.norm(), (outputs, tile_pairs, tokens)
                    assert torch.equal(y_NO, tiled_experts_linear(x, experts, tiles, 3 * tokens))
            assert not experts.weight.tickets.any()

    @pytest.mark.parametrize("tile_pairs", [8, 32, 128])
    def test_a_captured_product_serves_any_choice_of_experts(self, tile_pairs: int) -> None:
        experts = ExpertCodes(NF4Scheme(), (8, 512, 1024), torch.bfloat16, torch.device("cuda"))
        fill(experts, NF4Scheme())
        x = torch.randn(50, 1024, device="cuda", dtype=torch.bfloat16)
        y_NO, expert_TK = x.new_zeros(100, 512), torch.zeros(50, 2, dtype=torch.int32, device="cuda")

        def multiply() -> Tensor:
            return tiled_experts_linear(x, experts, make_tiles(expert_TK, 8, tile_pairs), 100)

        graph = captured(lambda: y_NO.copy_(multiply()))
        for most in (8, 1, 3):
            expert_TK.copy_(torch.randint(0, most, (50, 2)))
            graph.replay()
            assert torch.equal(y_NO, multiply())
