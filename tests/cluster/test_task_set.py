"""Background tasks: they run to their ends, unless they are cancelled together."""

from __future__ import annotations

import asyncio
import gc

from lorafleet.cluster.task_set import TaskSet


async def test_tasks_that_nobody_else_stores_run_until_they_are_cancelled() -> None:
    tasks, ended = TaskSet(), list[str]()
    opened = asyncio.Event()

    async def work() -> None:
        try:
            await opened.wait()
            ended.append("done")
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    tasks.start(work())
    await asyncio.sleep(0)
    gc.collect()
    opened.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    tasks.cancel()
    await asyncio.sleep(0)
    assert ended == ["done", "cancelled"]
