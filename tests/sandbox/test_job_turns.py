"""Turns: groups alternate, none takes every place, queues are bounded, and who leaves gives its place back."""

from __future__ import annotations

import asyncio

import pytest

from lorafleet.sandbox.job_turns import JobTurns, NoRoom, TurnLimits, TurnQueue


def drained(queue: TurnQueue[str]) -> list[str]:
    """All jobs, each of which ends before the next one begins."""
    jobs = []
    while (taken := queue.take()) is not None:
        jobs.append(taken[1])
        queue.done(taken[0])
    return jobs


def test_groups_take_turns_however_much_one_of_them_asks_for() -> None:
    queue: TurnQueue[str] = TurnQueue(TurnLimits(running=1, waiting=10))
    for i in range(5):
        queue.put("loud", f"loud {i}")
    queue.put("quiet", "quiet 0")
    queue.put("other", "other 0")
    queue.put("quiet", "quiet 1")
    assert drained(queue)[:6] == ["loud 0", "quiet 0", "other 0", "loud 1", "quiet 1", "loud 2"]


def test_one_group_leaves_a_place_to_others() -> None:
    queue: TurnQueue[str] = TurnQueue(TurnLimits(running=3, waiting=10))
    for i in range(5):
        queue.put("loud", f"loud {i}")
    assert [queue.take() for _ in range(3)] == [("loud", "loud 0"), ("loud", "loud 1"), None]
    queue.put("quiet", "quiet")
    assert queue.take() == ("quiet", "quiet")
    queue.done("loud")
    assert queue.take() == ("loud", "loud 2")


def test_a_full_queue_rejects_its_group_alone_and_all_queues_together_are_bounded() -> None:
    queue: TurnQueue[str] = TurnQueue(TurnLimits(running=1, waiting=2, waiting_in_all=3))
    queue.put("a", "1")
    queue.put("a", "2")
    with pytest.raises(NoRoom, match="2 jobs of the same tenant or model are waiting; at most 2 may wait"):
        queue.put("a", "3")
    queue.put("b", "4")
    with pytest.raises(NoRoom, match="3 jobs are already waiting; at most 3 may wait in total"):
        queue.put("c", "5")
    assert queue.remove("a", "2") and not queue.remove("a", "2")
    queue.put("c", "5")
    assert drained(queue) == ["1", "4", "5"] and len(queue) == 0


async def test_who_leaves_while_waiting_or_with_a_turn_gives_its_place_back() -> None:
    turns = JobTurns(TurnLimits(running=1, waiting=10))
    order: list[str] = []

    async def job(name: str, hold: asyncio.Event) -> None:
        async with turns.turn(name):
            order.append(name)
            await hold.wait()

    held, free = asyncio.Event(), asyncio.Event()
    free.set()
    first = asyncio.create_task(job("first", held))
    waiting = asyncio.create_task(job("waiting", free))
    last = asyncio.create_task(job("last", free))
    await asyncio.sleep(0)
    waiting.cancel()
    first.cancel()
    await asyncio.wait_for(last, 60)
    assert order == ["first", "last"]

    granted = asyncio.create_task(job("granted", free))
    await asyncio.sleep(0)
    granted.cancel()  # in the moment in which it has its turn
    await asyncio.wait_for(asyncio.create_task(job("after", free)), 60)
    assert order[-1] == "after"
