"""The kernel that exchanges P between shrink and expand. Ranks are streams of one GPU here."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from lorafleet.kernels.lora.lora_layout import LoRALayout
from lorafleet.kernels.ranks.peer_areas import PeerAreas
from tests.kernels.lora_ranks import FakeRank
from tests.kernels.one_gpu_ranks import Ranks

pytestmark = pytest.mark.gpu
SHAPES = [(8, 1, 12), (8, 64, 12), (2, 1, 16), (2, 64, 16), (1, 300, 7), (3, 1000, 48), (8, 64, 48)]


@pytest.mark.parametrize("exchange", ["gather", "reduce"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_equals_all_ranks_sums_over_splits(num_ranks: int, exchange: Literal["gather", "reduce"]) -> None:
    from lorafleet.kernels.lora.lora_exchange import exchanged_splits

    torch.manual_seed(num_ranks)
    ranks = Ranks(num_ranks, max(rows * columns for _, rows, columns in SHAPES) * 4)

    def layout(areas: PeerAreas) -> LoRALayout:
        return LoRALayout(exchange, FakeRank(areas.rank, num_ranks), peers=areas)

    for splits in {splits for splits, _, _ in SHAPES}:
        p_KTC = torch.zeros(splits, 1, 1, device="cuda")
        ranks.warm_up(lambda areas, p_KTC=p_KTC: exchanged_splits(p_KTC, layout(areas)))
    for shape in SHAPES * 3:
        ps = [
            torch.randn(shape, device="cuda").where(torch.rand(shape, device="cuda") > 0.2, -0.0) for _ in ranks.areas
        ]
        found = ranks.run(lambda areas, ps=ps: exchanged_splits(ps[areas.rank], layout(areas)))
        whole = torch.stack([p.double().sum(0) for p in ps])
        want = whole if exchange == "gather" else whole.sum(0, keepdim=True)
        for of_rank in found:
            torch.testing.assert_close(of_rank.double(), want, atol=1e-5, rtol=1e-5)
            assert torch.equal(of_rank, found[0]), "the ranks have other bits"
    assert ranks.is_empty
