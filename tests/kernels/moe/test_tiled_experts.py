"""Experts with codes of four bits: the CUDA kernels, emulated on this CPU, against a loop over the pairs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.moe.expert_codes import ExpertCodes
from lorafleet.kernels.moe.moe_codes_cuda import launch_tiles
from lorafleet.kernels.moe.moe_tiles_triton import ExpertTiles
from lorafleet.kernels.quant.tiled_weight import TiledWeight
from tests.kernels.quant.four_bit_cases import CASES, filled
from tests.kernels.quant.test_four_bit_source import EMULATED, compiled, emulated_kernels

EXPERTS, OUTPUTS, INPUTS, PER_TOKEN = 4, 192, 320, 2
# Pairs of a tile, tokens and programs: items that programs share, whole ones, and programs without work.
LAUNCHES = ((8, 13, 3), (8, 1, 7), (16, 21, 2), (32, 40, 4), (64, 57, 2), (128, 100, 3))


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


@pytest.mark.parametrize("case", EMULATED)
def test_tiles_of_pairs_are_multiplied_by_their_experts(case: str, folder: Path) -> None:
    experts, generator = experts_of(case), torch.Generator().manual_seed(8)
    assert isinstance(experts.weight, TiledWeight)
    library = compiled(experts.weight, folder)
    values_EOD = torch.stack([experts[expert].double() for expert in range(EXPERTS)])
    for tile_pairs, tokens, programs in LAUNCHES:
        kernels = emulated_kernels(library, programs, experts.weight)
        # Half of the tokens choose the first expert, and none chooses the third.
        expert_N = torch.tensor([0, 1, 3])[torch.randint(0, 3, (tokens * PER_TOKEN,), generator=generator)]
        expert_N[: tokens // 2] = 0
        for rows in (tokens, tokens * PER_TOKEN):
            x = torch.randn(rows, INPUTS, generator=generator).to(experts.weight.dtype)
            y_NO = launch_tiles(x, experts, tiles_of(expert_N, tile_pairs), len(expert_N), kernels)
            x_ND = x.double().repeat_interleave(len(expert_N) // rows, dim=0)
            want_NO = torch.einsum("nod,nd->no", values_EOD[expert_N], x_ND)
            assert (y_NO.double() - want_NO).norm() < 0.004 * want_NO.norm(), (tile_pairs, tokens)
            assert not experts.weight.tickets.any()
