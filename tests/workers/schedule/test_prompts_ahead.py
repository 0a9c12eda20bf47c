"""Steps that compute prompts are known before they are scheduled, so that they have no drafts."""

from __future__ import annotations

from typing import Any

from lorafleet.workers.schedule.prompts_ahead import computes_prompts
from tests.workers.schedule.test_scheduler import SlotsForAll, lora, scheduler, sequence, step


class Asked:
    """Counts how often drafts are asked for, and has none."""

    count = 0

    def choose(self, unfinished: Any, num_sequences: int, *, is_behind: bool) -> dict[Any, list[int]]:  # noqa: ARG002  it has none for any
        self.count += 1
        return {}


def test_a_step_computes_prompts_while_any_has_tokens_left() -> None:
    made = scheduler(most=64)
    assert not computes_prompts(made)
    made.add(sequence("a", 100))
    for _ in range(2):
        assert computes_prompts(made)
        step(made)
    assert not computes_prompts(made)


def test_a_waiting_sequence_without_room_is_no_prompt() -> None:
    for options, num_prompt in (({"num_blocks": 8}, 200), ({"max_num_seqs": 1}, 10)):
        made = scheduler(**options)
        made.add(sequence("a", 10))
        step(made)
        made.add(sequence("waits", num_prompt))
        assert not computes_prompts(made)


def test_a_waiting_sequence_that_would_leave_too_little_for_those_that_run_is_no_prompt() -> None:
    """There are blocks for its tokens. Once a start was tried, the reason against it is known."""
    made = scheduler(num_blocks=64)
    made.add(sequence("a", 16 * 62))
    step(made)
    made.add(sequence("waits", 8))
    assert made.kv.num_free >= made.kv.blocks_for(8) and computes_prompts(made)
    assert step(made) == {"a": 1}
    assert not computes_prompts(made)


def test_a_waiting_sequence_whose_adapter_is_not_in_a_slot_is_no_prompt() -> None:
    made = scheduler(loras=SlotsForAll())
    made.add(sequence("waits", 10, lora=lora("elsewhere")))
    assert not computes_prompts(made)
    made.add(sequence("starts", 10, lora=lora("warm")))
    assert computes_prompts(made)


def test_steps_that_compute_prompts_ask_for_no_drafts() -> None:
    made, asked = scheduler(), Asked()
    made.speculation = asked  # type: ignore[assignment]  # as much of it as a scheduler asks
    made.add(sequence("a", 10))
    for prompts, count in (([], 0), ([], 1), (["b"], 1), ([], 2)):
        for name in prompts:
            made.add(sequence(name, 10))
        step(made)
        assert asked.count == count


def test_behind_a_step_in_flight_nobody_asks_again_whether_prompts_are_computed() -> None:
    """The engine has asked before drafts were prepared, and the drafts must not be dropped by another answer."""
    made, asked = scheduler(), Asked()
    made.speculation = asked  # type: ignore[assignment]  # as much of it as a scheduler asks
    made.add(sequence("a", 10))
    in_flight = made.schedule()
    made.launched(in_flight)
    made.add(sequence("b", 10))
    assert computes_prompts(made) and asked.count == 0
    made.schedule(in_flight)
    assert asked.count == 1
