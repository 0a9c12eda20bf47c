from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from lorafleet.cluster.directory.slices import SLICE_S, in_slices


async def test_others_have_the_loop_after_each_slice_of_work() -> None:
    now = 0.0
    seen: list[int] = []
    done = 0

    def steps() -> Iterator[None]:
        nonlocal now, done
        for _ in range(40):
            now += SLICE_S / 4
            done += 1
            yield

    async def other() -> None:
        while True:
            seen.append(done)
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())
    await in_slices(steps(), lambda: now)
    beside.cancel()
    assert done == 40
    assert {4, 8, 12, 36} <= set(seen)


async def test_an_error_in_a_step_is_raised() -> None:
    def steps() -> Iterator[None]:
        yield
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        await in_slices(steps())
