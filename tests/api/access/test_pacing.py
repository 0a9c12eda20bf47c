from __future__ import annotations

import asyncio

from lorafleet.api.access.pacing import PARTS_A_TURN, in_turns


async def test_others_have_their_turn_within_a_loop_over_many_parts() -> None:
    seen: list[int] = []
    turns: list[int] = []

    async def other() -> None:
        while len(seen) < 10 * PARTS_A_TURN:
            turns.append(len(seen))
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    async for part in in_turns(range(10 * PARTS_A_TURN)):
        seen.append(part)  # noqa: PERF401  # the other one looks at it
    await task
    assert seen == list(range(10 * PARTS_A_TURN))
    assert turns == [i * PARTS_A_TURN for i in range(1, 10)]


async def test_few_parts_are_gone_through_at_once() -> None:
    other = asyncio.create_task(asyncio.sleep(0))
    assert [part async for part in in_turns(["a", "b"])] == ["a", "b"]
    assert not other.done()
    await other
