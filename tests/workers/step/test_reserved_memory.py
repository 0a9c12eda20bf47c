from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lorafleet.workers.step.reserved_memory import reserve_logits

ROWS, HIDDEN, VOCABULARY = 64, 8, 1_000_000


class Head:
    """The parts of a model that logits need."""

    def __init__(self, device: str) -> None:
        self.config = SimpleNamespace(hidden_size=HIDDEN)
        self.embed_tokens = SimpleNamespace(weight=torch.zeros(VOCABULARY, HIDDEN, dtype=torch.bfloat16, device=device))
        self.num_rows: list[int] = []

    def logits(self, hidden_BD: Tensor) -> Tensor:
        self.num_rows.append(len(hidden_BD))
        return hidden_BD @ self.embed_tokens.weight.T


def test_nothing_is_reserved_on_a_cpu() -> None:
    model: Any = Head("cpu")
    reserve_logits(model, ROWS, torch.device("cpu"))
    assert model.num_rows == []


def test_a_lack_of_memory_is_logged_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class FullHead(Head):
        def logits(self, hidden_BD: Tensor) -> Tensor:
            raise torch.OutOfMemoryError(f"no room for {len(hidden_BD)} rows")

    model: Any = FullHead("cpu")
    reserve_logits(model, ROWS, torch.device("cuda"))
    assert "no room for 64 rows" in caplog.text and "lower gpu_memory_utilization" in caplog.text


class TestOnGPU:
    pytestmark = pytest.mark.gpu

    def test_the_driver_is_not_asked_for_memory_when_steps_have_more_rows_than_before(self) -> None:
        model: Any = Head("cuda")
        reserve_logits(model, ROWS, torch.device("cuda"))
        num_allocations = torch.cuda.memory_stats()["num_device_alloc"]
        for count in range(1, ROWS + 1):
            model.logits(torch.zeros(count, HIDDEN, dtype=torch.bfloat16, device="cuda"))
        assert torch.cuda.memory_stats()["num_device_alloc"] == num_allocations
