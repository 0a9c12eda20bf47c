from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.lora.lora_batch import LoRABatch
from lorafleet.kernels.lora.packed_lora import LoRATables, PackedLoRA
from lorafleet.kernels.quant.base_weight import BaseWeight, PlainWeight
from lorafleet.workers.bases.model_config import NormStyle
from lorafleet.workers.models import layers
from lorafleet.workers.models.layers import Norm, PackedLinear, ResidualSum
from lorafleet.workers.tp.group import TPGroup
from lorafleet.workers.tp.row_parallel_sum import RankSum

CPU = torch.device("cpu")


class Recording(TPGroup):
    """Keeps what is summed; the other ranks' parts are zero."""

    summed: list[Tensor]

    def all_reduce(self, x: Tensor) -> Tensor:
        Recording.summed.append(x.clone())
        return x


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    monkeypatch.setattr(Recording, "summed", [], raising=False)
    return Recording.summed


@pytest.fixture
def with_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, where what adapters add comes apart."""

    def linear(x: Tensor, weight: BaseWeight, bias: Tensor | None, *_: object) -> LinearOutput:
        return LinearOutput(weight.linear(x, bias), torch.full((len(x), weight.num_outputs), 100.0))

    monkeypatch.setattr(layers, "linear_with_lora", linear)


def linear_of_ones(**options: bool) -> PackedLinear:
    linear = PackedLinear(4, (3,), True, torch.float32, CPU, **options)
    linear.weight = PlainWeight(torch.ones(3, 4))
    linear.bias.fill_(10.0)
    linear.lora = PackedLoRA(0, 4, (3,), LoRATables(1, 1, CPU))
    return linear


def forward(linear: PackedLinear) -> LinearOutput:
    batch = LoRABatch.build([0, 0], linear.lora.tables)
    return linear(torch.ones(2, 4), batch)


def norm_of(group: TPGroup) -> ResidualSum:
    norm = Norm(3, NormStyle(0.0), torch.float32, CPU)
    norm.weight.fill_(1.0)
    return ResidualSum(norm, 1.0, 0.0, RankSum(group, CPU))


@pytest.mark.usefixtures("with_delta")
@pytest.mark.parametrize(("adds_bias", "y"), [(True, 14.0), (False, 4.0)])
def test_a_linear_leaves_the_adapters_part_to_who_reads_it_and_the_bias_to_one_rank(adds_bias: bool, y: float) -> None:
    found, delta, *_ = forward(linear_of_ones(adds_bias=adds_bias))
    assert found.tolist() == [[y] * 3] * 2
    assert delta is not None and delta.tolist() == [[100.0] * 3] * 2


@pytest.mark.parametrize("delta", [None, 100.0])
def test_one_sum_over_the_ranks_carries_base_and_adapters(summed, delta: float | None) -> None:
    y, residual = torch.full((2, 3), 4.0), torch.ones(2, 3)
    total = 4.0 + (delta or 0.0)
    out = norm_of(Recording(0, 2)).add(
        LinearOutput(y, None if delta is None else torch.full((2, 3), delta)), residual, None
    )
    assert [part.tolist() for part in summed] == [[[total] * 3] * 2]
    assert residual.tolist() == [[total + 1.0] * 3] * 2
    assert out.tolist() == [[1.0] * 3] * 2


def test_one_rank_sums_nothing(summed) -> None:
    residual = torch.ones(2, 3)
    norm_of(Recording()).add(LinearOutput(torch.ones(2, 3), torch.ones(2, 3)), residual, None)
    assert residual.tolist() == [[3.0] * 3] * 2
    assert not summed
