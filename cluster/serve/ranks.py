"""Manages all ranks of one replica. They are started at once, and none outlives another.

A rank that lost a peer may wait for it in a collective forever, where no call reaches it. Therefore the replica ends
all ranks as soon as it notices that one has failed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TypeVar

from ray.util.placement_group import get_current_placement_group

from lorafleet.cluster.serve.worker_actor import StartOrder, WorkerHandle
from lorafleet.protocol.errors import EngineDead, LorafleetError
from lorafleet.protocol.messages import EngineHello

CAUSE_S = 1.0  # Seconds after the first error of a rank within which its cause is known.
STOP_S = 5.0

T = TypeVar("T")

logger = logging.getLogger("lorafleet.cluster")


class ReplicaRanks:
    """The worker actors of one replica: one for each bundle of its placement group except the first."""

    def __init__(self, size: int, num_cpus: float, num_gpus: int) -> None:
        group = get_current_placement_group()
        assert group is not None, "a replica has a placement group: see cluster/serve/app.py"
        self._ranks = [WorkerHandle(rank, group, num_cpus, num_gpus) for rank in range(size)]
        self._running = False

    async def start(self, order: StartOrder) -> EngineHello:
        """Starts all ranks, and returns what rank 0 reports about its engine. If any fails, raises the error of the
        rank that failed first, in its own words; stop() then ends the others."""
        starting = [asyncio.create_task(rank.start(order)) for rank in self._ranks]
        try:
            failure = await _first_failure(starting)
            if failure is not None:
                raise failure
        finally:
            await _cancel(starting)
        self._running = True
        hello = starting[0].result()
        assert hello is not None
        return hello

    async def check_health(self) -> None:
        """Raises EngineDead as soon as one rank is known to have ended."""
        checks = [asyncio.create_task(rank.check_health()) for rank in self._ranks]
        try:
            await asyncio.gather(*checks)
        except EngineDead:
            self._running = False
            raise
        finally:
            await _cancel(checks)

    async def stop(self) -> None:
        """Ends all ranks of the replica. Healthy ranks end their work first: rank 0 before the rest, since it would
        otherwise miss a peer in the middle of a step."""
        if self._running:
            self._running = False
            try:
                async with asyncio.timeout(STOP_S):
                    for rank in self._ranks:
                        await rank.shutdown()
            except Exception as error:
                logger.warning("the workers did not stop by themselves: %r", error)
        for rank in self._ranks:
            rank.kill()


async def _first_failure(
    starting: Sequence[asyncio.Task[EngineHello | None]], cause_s: float = CAUSE_S
) -> BaseException | None:
    """Returns the error that made the start fail, or None when all ranks have started. One rank's failure makes
    others fail too; their errors come within cause_s seconds of the cause."""
    errors: list[BaseException] = []
    waiting, wait_s = set(starting), None
    while waiting:
        done, waiting = await asyncio.wait(waiting, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        errors += [error for task in done if (error := task.exception()) is not None]
        if not done or any(_is_a_cause(error) for error in errors):
            break
        if errors:
            wait_s = cause_s
    return min(errors, key=lambda error: (not _is_a_cause(error), not isinstance(error, EngineDead)), default=None)


def _is_a_cause(error: BaseException) -> bool:
    """Returns whether a rank has reported a fault of its own. Other errors may only mean that it lost a peer."""
    return isinstance(error, LorafleetError) and not isinstance(error, EngineDead)


async def _cancel(calls: Sequence[asyncio.Task[T]]) -> None:
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
