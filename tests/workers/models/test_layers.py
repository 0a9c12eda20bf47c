from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.lora_batch import LoRABatch
from lorafleet.kernels.packed_lora import LoRATables, PackedLoRA
from lorafleet.workers.models import layers
from lorafleet.workers.models.layers import PackedLinear
from lorafleet.workers.tp.group import TPGroup

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

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *_: object) -> tuple[Tensor, Tensor]:
        return torch.nn.functional.linear(x, weight, bias), torch.full((len(x), len(weight)), 100.0)

    monkeypatch.setattr(layers, "linear_with_lora", linear)


def linear_of_ones(sum_over: TPGroup | None) -> PackedLinear:
    linear = PackedLinear(4, (3,), True, torch.float32, CPU, sum_over)
    linear.weight.fill_(1.0)
    linear.bias.fill_(10.0)
    linear.lora = PackedLoRA(0, 4, (3,), LoRATables(1, 1, CPU))
    return linear


def forward(linear: PackedLinear) -> tuple[Tensor, Tensor | None]:
    batch = LoRABatch.build([0, 0], linear.lora.tables)
    return linear(torch.ones(2, 4), batch)


@pytest.mark.usefixtures("with_delta")
@pytest.mark.parametrize(("rank", "bias"), [(0, 10.0), (1, 0.0)])
def test_one_sum_carries_base_and_adapters_and_the_bias_once(summed, rank: int, bias: float) -> None:
    y, delta = forward(linear_of_ones(Recording(rank, 2)))
    assert delta is None
    assert [part.tolist() for part in summed] == [[[104.0 + bias] * 3] * 2] == [y.tolist()]


@pytest.mark.usefixtures("with_delta")
@pytest.mark.parametrize("sum_over", [None, Recording()])
def test_a_linear_of_one_rank_leaves_the_adapters_part_to_who_reads_it(summed, sum_over) -> None:
    y, delta = forward(linear_of_ones(sum_over))
    assert y.tolist() == [[14.0] * 3] * 2
    assert delta is not None and delta.tolist() == [[100.0] * 3] * 2
    assert not summed
