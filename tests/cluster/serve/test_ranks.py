"""Which error a replica's start ends with; whole replicas lose ranks in test_tensor_parallel.py."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lorafleet.cluster.serve import ranks
from lorafleet.protocol.errors import ConfigError, EngineDead

NEVER = 3600.0
LOST = EngineDead("rank 1 of the replica has ended")
RESET = RuntimeError("Connection reset by peer")
OWN = ConfigError("the model does not fit")


async def rank(end_s: float, error: Exception | None) -> Any:
    await asyncio.sleep(end_s)
    if error is not None:
        raise error


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([(0, None), (0.02, None)], None),
        ([(NEVER, None), (0, OWN)], OWN),
        ([(0, LOST), (0.02, OWN), (NEVER, None)], OWN),
        ([(0, RESET), (0.02, LOST)], LOST),
        ([(0, RESET), (NEVER, None)], RESET),
        ([(0, None), (0.02, LOST)], LOST),
    ],
)
async def test_the_rank_that_failed_of_itself_gives_the_error_and_nobody_waits_for_the_rest(ends, expected):
    starting = [asyncio.create_task(rank(end_s, error)) for end_s, error in ends]
    async with asyncio.timeout(60):
        assert await ranks._first_failure(starting, cause_s=0.1) is expected
        await ranks._cancel(starting)
