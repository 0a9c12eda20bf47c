"""One run for all who ask together."""

from __future__ import annotations

import asyncio

import pytest

from lorafleet.api.answer.shared_run import SharedRun


async def test_all_who_ask_during_a_run_share_it_and_one_who_leaves_ends_it_for_nobody() -> None:
    begun, has_begun, may_end = 0, asyncio.Event(), asyncio.Event()

    async def work() -> int:
        nonlocal begun
        begun += 1
        has_begun.set()
        await may_end.wait()
        return begun

    run = SharedRun(work)
    left = asyncio.create_task(run())
    others = [asyncio.create_task(run()) for _ in range(50)]
    await has_begun.wait()
    left.cancel()
    may_end.set()
    assert set(await asyncio.gather(*others)) == {1}
    assert await run() == 2, "what is asked later is made anew"


async def test_a_run_that_fails_fails_for_those_who_asked_and_the_next_one_is_made() -> None:
    fails = True

    async def work() -> str:
        if fails:
            raise ValueError("not now")
        return "made"

    run = SharedRun(work)
    with pytest.raises(ValueError, match="not now"):
        await run()
    fails = False
    assert await run() == "made"
