"""Accepts the replicas' reports, and publishes to the routers which replica holds what."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lorafleet.cluster.directory.directory_timing import DirectoryTiming
from lorafleet.cluster.directory.replica_table import ReplicaTable
from lorafleet.cluster.directory.residency import Report, Residency, Routes
from lorafleet.cluster.directory.wake_signal import WakeSignal


class RouteBroadcast:
    """Publishes the changes of `residency` to the long polls of all routers together."""

    def __init__(
        self, residency: Residency, replicas: ReplicaTable, timing: DirectoryTiming, clock: Callable[[], float]
    ) -> None:
        self.residency = residency
        self._replicas = replicas
        self._timing = timing
        self._clock = clock
        self._published = WakeSignal(clock)
        self._published_s = clock()
        self._scheduled: asyncio.TimerHandle | None = None

    def accept(self, report: Report) -> bool:
        """Accepts a report; see Residency.accept. A report that was in flight when its replica left is rejected, so
        that it does not register the replica again."""
        if report.replica_id not in self._replicas:
            return False
        self._replicas.record_call(report.replica_id)
        is_accepted = self.residency.accept(report)
        self.publish()
        return is_accepted

    async def routes(self, epoch: str, version: int) -> Routes:
        """Returns routes as soon as there are newer ones than `version` of `epoch`, or after hold_s."""
        deadline_s = self._clock() + self._timing.hold_s
        while (epoch, version) == (self.residency.epoch, self.residency.changes.version):
            if not await self._published.wait(deadline_s):
                break
        return self.residency.since(epoch, version)

    def publish(self) -> None:
        """Publishes all changes so far, as soon as the pause since the last publication is over."""
        if not self.residency.changes.has_unpublished:
            return
        pause_s = self._timing.moves_s if self.residency.changes.is_urgent else self._timing.loads_s
        wait_s = self._published_s + pause_s - self._clock()
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        if wait_s > 0:
            self._scheduled = asyncio.get_running_loop().call_later(wait_s, self.publish)
            return
        self._published_s = self._clock()
        self.residency.publish()
        self._published.wake()
