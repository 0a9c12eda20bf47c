from __future__ import annotations

from typing import Any

import pytest

from lorafleet.workers.step.interruption import IsInterrupted
from lorafleet.workers.step.late_work import LateWork


class Graphs:
    """Decode graphs of which some are left to capture."""

    def __init__(self, num_left: int) -> None:
        self.num_left = num_left

    def capture_one(self, *, is_idle: bool, is_interrupted: IsInterrupted) -> bool:
        if is_interrupted():
            return False
        self.num_left -= is_idle and self.num_left > 0
        return is_idle and self.num_left >= 0

    def replace_attention(self) -> None:
        self.num_left = 3


class Switching:
    """An attention that is replaced at the second look."""

    num_looks = 0

    def poll(self) -> bool:
        self.num_looks += 1
        return self.num_looks == 2


@pytest.mark.parametrize("is_idle", [False, True])
def test_memory_is_reserved_again_after_each_capture(is_idle: bool) -> None:
    graphs: Any = Graphs(2)
    reserved = []
    late = LateWork(None, graphs, lambda: reserved.append(graphs.num_left))
    for _ in range(2):
        late.run(is_idle=is_idle)
    assert reserved == ([1, 0] if is_idle else [])


def test_memory_is_reserved_again_after_the_attention_has_been_replaced() -> None:
    switching: Any = Switching()
    graphs: Any = Graphs(0)
    reserved = []
    late = LateWork(switching, graphs, lambda: reserved.append(graphs.num_left))
    for _ in range(3):
        late.run(is_idle=False)
    assert reserved == [3], "after the graphs have been dropped"
    assert late.switched_s > 0


def test_only_work_of_idle_time_is_interrupted() -> None:
    graphs: Any = Graphs(1)
    reserved: list[int] = []
    late = LateWork(None, graphs, lambda: reserved.append(graphs.num_left))
    late.run(is_idle=True, is_interrupted=lambda: True)
    assert reserved == []
    late.run(is_idle=True, is_interrupted=lambda: False)
    assert reserved == [0]
