from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from lorafleet.kernels.lora.lora_batch import BASE_SLOT
from lorafleet.workers.step import decode_graphs
from lorafleet.workers.step.decode_capture import DecodeKey
from lorafleet.workers.step.decode_graphs import CAPTURE_PERIOD_S, DecodeGraphs
from lorafleet.workers.step.drafted_sizes import DraftedSizes, DraftShape
from lorafleet.workers.step.interruption import IsInterrupted, WorkInterrupted, never

SIZES = [1, 2, 4, 8, 40, 64, 128]
RARE_SLOT = 7
EXPERT_SLOT = 6


class Capturer:
    """Captures keys instead of graphs."""

    def __init__(self) -> None:
        self.captured: list[DecodeKey] = []
        self.has_graphs = self.has_drafted = True
        self.num_forgotten = 0
        self.error: Exception | None = None

    def capture(self, key: DecodeKey, is_interrupted: IsInterrupted = never) -> Any:
        if is_interrupted():
            raise WorkInterrupted
        if self.error is not None:
            raise self.error
        if not (self.has_graphs if key.drafts is None else self.has_drafted):
            return None
        self.captured.append(key)
        return key

    def forget(self) -> None:
        self.num_forgotten += 1

    def fill(self, decode: Any, plan: Any, unread: Any = None) -> None:
        raise AssertionError(f"nothing runs here: {decode}, {plan}, {unread}")

    def replay(self, decode: Any, num_rows: int) -> Any:
        raise AssertionError(f"nothing runs here: {decode}, {num_rows}")


class Slots:
    def tile_counts(self, num_tokens: int) -> list[int]:
        return sorted({min(2, num_tokens), num_tokens})

    def has_rare(self, slots: Sequence[int]) -> bool:
        return RARE_SLOT in slots

    def has_experts(self, slots: Sequence[int]) -> bool:
        return EXPERT_SLOT in slots


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def find(graphs: DecodeGraphs, *slots: int) -> Any:
    return graphs.find(list(slots), [5] * len(slots))


def test_a_start_captures_the_largest_size_first_and_then_only_the_first_sizes() -> None:
    capturer = Capturer()
    graphs = DecodeGraphs(capturer, SIZES, (1, 8), Slots(), max_context=100)
    assert [key.num_rows for key in capturer.captured] == [128] * 4 + [8] * 4 + [1] * 3
    assert capturer.captured[:4] == [
        DecodeKey(128, 0),
        DecodeKey(128, 2),
        DecodeKey(128, 128),
        DecodeKey(128, 128, True),
    ]
    assert graphs.most == 26
    everything = DecodeGraphs(Capturer(), SIZES, SIZES, Slots(), max_context=100)
    assert len(everything) == everything.most
    assert not everything.has_more


def test_a_step_has_a_graph_with_experts_only_if_an_adapter_is_on_them() -> None:
    capturer = Capturer()
    graphs = DecodeGraphs(capturer, [8], [8], Slots(), max_context=100, has_mixtures=True)
    kinds = [
        (0, False, False),
        (2, False, False),
        (2, False, True),
        (8, False, False),
        (8, False, True),
        (8, True, True),
    ]
    assert capturer.captured == [DecodeKey(8, *kind) for kind in kinds]
    assert find(graphs, 0) == DecodeKey(8, 2)
    assert find(graphs, EXPERT_SLOT) == DecodeKey(8, 2, takes_experts=True)
    assert find(graphs, 0, RARE_SLOT) == DecodeKey(8, 8, takes_rare=True, takes_experts=True)
    assert find(graphs, BASE_SLOT, BASE_SLOT) == DecodeKey(8, 0)


def test_a_step_uses_the_next_captured_size_until_its_own_is_captured() -> None:
    capturer, clock = Capturer(), Clock()
    graphs = DecodeGraphs(capturer, SIZES, (1, 8), Slots(), max_context=100, clock=clock)
    assert find(graphs, BASE_SLOT) == DecodeKey(1, 0)
    assert not graphs._wanted
    assert find(graphs, *[BASE_SLOT] * 3) == DecodeKey(8, 0)
    assert find(graphs, 0, 1, BASE_SLOT) == DecodeKey(8, 8)  # three tiles
    assert find(graphs, 0, RARE_SLOT) == DecodeKey(8, 8, True)
    assert not graphs.capture_one(is_idle=False)  # the start has just captured
    clock.now_s += CAPTURE_PERIOD_S
    assert graphs.capture_one(is_idle=False)
    assert capturer.captured[-1] == DecodeKey(2, 2, True)  # the latest one
    assert not graphs.capture_one(is_idle=False)
    clock.now_s += CAPTURE_PERIOD_S
    assert graphs.capture_one(is_idle=False)
    assert find(graphs, 0, 1, BASE_SLOT) == capturer.captured[-1] == DecodeKey(4, 4)
    clock.now_s += CAPTURE_PERIOD_S
    assert graphs.capture_one(is_idle=False)
    assert find(graphs, *[BASE_SLOT] * 3) == DecodeKey(4, 0)
    clock.now_s += CAPTURE_PERIOD_S
    assert not graphs.capture_one(is_idle=False)  # no step lacks any


def test_a_much_larger_graph_or_one_for_shorter_contexts_is_not_used() -> None:
    graphs = DecodeGraphs(Capturer(), SIZES, (1, 8), Slots(), max_context=100)
    assert find(graphs, *[BASE_SLOT] * 9) is None  # 128 rows would take much longer than 40
    assert find(graphs, *[BASE_SLOT] * 64) == DecodeKey(128, 0)
    assert find(graphs, *[BASE_SLOT] * 129) is None
    assert graphs.find([0, RARE_SLOT], [5, 101]) is None


def test_idle_time_captures_all_that_is_missing() -> None:
    capturer = Capturer()
    graphs = DecodeGraphs(capturer, SIZES, (1,), Slots(), max_context=100, clock=Clock())
    find(graphs, BASE_SLOT, BASE_SLOT)
    assert graphs.capture_one(is_idle=True)
    assert capturer.captured[-1] == DecodeKey(2, 0)  # what a step has lacked comes first
    while graphs.has_more:
        assert graphs.capture_one(is_idle=True)
    assert len(graphs) == graphs.most == len(set(capturer.captured)) == len(capturer.captured)
    assert not graphs.capture_one(is_idle=True)


def test_another_attention_has_graphs_of_its_own() -> None:
    capturer, clock = Capturer(), Clock()
    capturer.has_graphs = False
    graphs = DecodeGraphs(capturer, SIZES, (1, 8), None, max_context=100, clock=clock)
    assert find(graphs, BASE_SLOT) is None
    assert not graphs.has_more
    assert not graphs.capture_one(is_idle=True)
    capturer.has_graphs = True
    graphs.restart()
    clock.now_s += CAPTURE_PERIOD_S
    assert find(graphs, BASE_SLOT) is None
    assert graphs.capture_one(is_idle=False)
    assert capturer.captured == [DecodeKey(128, 0)]  # the others fit into its memory
    assert find(graphs, BASE_SLOT) is None
    clock.now_s += CAPTURE_PERIOD_S
    assert graphs.capture_one(is_idle=False)
    assert find(graphs, BASE_SLOT) == DecodeKey(1, 0)
    graphs.restart()
    assert capturer.num_forgotten == 2
    assert find(graphs, BASE_SLOT) is None
    while graphs.has_more:
        assert graphs.capture_one(is_idle=True)
    assert len(graphs) == graphs.most == len(SIZES)


class Backend(Capturer):
    """Captures keys of the attention that is the present one."""

    def capture(self, key: DecodeKey, is_interrupted: IsInterrupted = never) -> Any:
        captured = super().capture(key, is_interrupted)
        return None if captured is None else (self.num_forgotten, captured)


def test_steps_use_the_graphs_of_the_attention_before_until_there_are_new_ones() -> None:
    graphs = DecodeGraphs(Backend(), [1, 8, 64], (1, 8), None, max_context=100, clock=Clock())
    graphs.replace_attention()
    assert len(graphs) == 0
    assert find(graphs, BASE_SLOT) == (0, DecodeKey(1, 0))
    assert graphs.capture_one(is_idle=True)
    assert find(graphs, *[BASE_SLOT] * 50) == (1, DecodeKey(64, 0))
    assert find(graphs, BASE_SLOT) == (0, DecodeKey(1, 0))
    while graphs.has_more:
        assert graphs.capture_one(is_idle=True)
    assert find(graphs, BASE_SLOT) == (1, DecodeKey(1, 0))
    assert not graphs._former
    graphs.restart()  # the addresses have changed
    assert find(graphs, BASE_SLOT) is None


def test_graphs_of_the_attention_before_make_room_for_the_new_ones() -> None:
    capturer = Backend()
    graphs = DecodeGraphs(capturer, [1, 8], (1, 8), None, max_context=100, clock=Clock())
    graphs.replace_attention()
    capturer.error = RuntimeError("out of memory")
    assert not graphs.capture_one(is_idle=True)
    assert find(graphs, BASE_SLOT) is None
    capturer.error = None
    while graphs.has_more:
        assert graphs.capture_one(is_idle=True)
    assert find(graphs, BASE_SLOT) == (1, DecodeKey(1, 0))


def test_a_capture_that_is_interrupted_is_begun_anew_later() -> None:
    graphs = DecodeGraphs(Capturer(), SIZES, (1,), None, max_context=100, clock=Clock())
    for _ in range(3):
        assert not graphs.capture_one(is_idle=True, is_interrupted=lambda: True)
    assert graphs.has_more
    assert graphs.capture_one(is_idle=True)


def test_a_late_capture_that_fails_is_the_last_one_and_ends_no_step(caplog: pytest.LogCaptureFixture) -> None:
    capturer = Capturer()
    graphs = DecodeGraphs(capturer, SIZES, (1,), None, max_context=100, clock=Clock())
    capturer.error = RuntimeError("out of memory")
    with caplog.at_level(logging.WARNING, decode_graphs.__name__):
        assert not graphs.capture_one(is_idle=True)
    assert "out of memory" in caplog.text
    assert not graphs.has_more
    assert find(graphs, BASE_SLOT) == DecodeKey(1, 0)
    with pytest.raises(RuntimeError, match="out of memory"):
        DecodeGraphs(capturer, SIZES, (1,), None, max_context=100)


def test_graphs_with_drafts_grow_slowly_and_have_room_for_every_step() -> None:
    sizes = DraftedSizes.of(5, 200, 384, (1, 4, 64))
    assert sizes.counts[:5] == (8, 16, 32, 48, 64) and sizes.counts[-1] == 384
    assert sizes.first == {8, 32, 320}
    for num_seqs in (1, 7, 32, 64, 200):
        for num_rows in range(num_seqs + 1, min(384, 5 * num_seqs) + 1):
            smallest, *_ = sizes.fitting(num_rows, num_seqs)
            assert sizes.shape(smallest).num_seqs >= num_seqs
            assert smallest <= max(32, 1.4 * num_rows, 2 * num_seqs + 63)
    assert sizes.fitting(385, 100) == []
    assert DraftedSizes.of(5, 3, 15, (1, 64)) == DraftedSizes(5, 3, (8, 15), frozenset((8, 15)))
    assert DraftedSizes.of(5, 8, 40, None).first == {8, 16, 32, 40}  # ranks capture together


def test_a_step_with_drafts_has_graphs_of_its_own() -> None:
    capturer = Capturer()
    drafted = DraftedSizes.of(3, 24, 48, (1, 8))
    graphs = DecodeGraphs(capturer, [1, 2, 8], (1,), Slots(), max_context=100, drafted=drafted)
    largest = DraftShape(24, 3)
    assert capturer.captured[:4] == [
        DecodeKey(48, 0, drafts=largest),
        DecodeKey(48, 2, drafts=largest),
        DecodeKey(48, 48, drafts=largest),
        DecodeKey(48, 48, takes_rare=True, drafts=largest),
    ]
    assert {key.num_rows for key in capturer.captured} == {1, 8, 32, 48}
    assert find(graphs, BASE_SLOT) == DecodeKey(1, 0)
    assert graphs.find([BASE_SLOT] * 4, [9, 9]) == DecodeKey(8, 0, drafts=DraftShape(8, 3))
    assert graphs.find([4] * 3 + [5] * 3 + [BASE_SLOT], [9, 9, 9]) == DecodeKey(8, 8, drafts=DraftShape(8, 3))
    assert graphs.find([4] * 3 + [RARE_SLOT] * 3, [9, 9]) == DecodeKey(8, 8, True, drafts=DraftShape(8, 3))
    assert graphs.find([BASE_SLOT] * 12, [9] * 6) == DecodeKey(32, 0, drafts=DraftShape(24, 3))
    assert graphs.capture_one(is_idle=True)
    assert graphs.find([BASE_SLOT] * 12, [9] * 6) == capturer.captured[-1] == DecodeKey(16, 0, drafts=DraftShape(16, 3))
    assert graphs.find([BASE_SLOT] * 49, [9] * 20) is None
    assert DecodeGraphs(Capturer(), [8], [8], None, max_context=100).find([BASE_SLOT] * 4, [9, 9]) is None


def test_an_attention_without_drafts_has_the_other_graphs() -> None:
    capturer = Capturer()
    capturer.has_drafted = False
    drafted = DraftedSizes.of(3, 24, 48, (1, 8))
    graphs = DecodeGraphs(capturer, [1, 2, 8], (1,), None, max_context=100, drafted=drafted)
    assert graphs.find([BASE_SLOT] * 4, [9, 9]) is None
    assert capturer.captured == [DecodeKey(8, 0), DecodeKey(1, 0)]
    assert graphs.most == 3
    capturer.has_drafted = True
    graphs.restart()  # after another attention has taken over
    assert graphs.most == 3 + len(drafted.counts)
