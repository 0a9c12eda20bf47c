"""Extends Ray Serve's manager of HAProxy, an actor on every node that clients reach: this one also watches HAProxy.

Serve's own manager starts HAProxy and gives it new configurations, but takes half a minute to notice that it has
ended. This one starts another at once. It also frees requests that wait for a replica which has stopped answering.
HAProxy sends them to another replica if their answers have not begun and they may be repeated.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.serve._private import haproxy as serves

from lorafleet.cluster.proxy.haproxy import EXPECTED_VARIABLE
from lorafleet.cluster.proxy.haproxy_sessions import free_waiting
from lorafleet.cluster.proxy.replica_gaps import ReplicaGaps

LOOK_S = 0.2  # Seconds between two checks of HAProxy.
ANSWER_S = 0.5  # Seconds that HAProxy has to answer on its admin socket.
MAX_IDLE = 4  # HAProxy is killed if it has neither answered nor run for so many checks in a row,
MAX_UNANSWERED = 40  # or if it has run, or waited for a processor, without an answer for so many.

logger = logging.getLogger("ray.serve")

ServesManager: Any = serves.HAProxyManager.__ray_metadata__.modified_class  # type: ignore[attr-defined]  # Ray adds it


class WatchedHAProxyManager(ServesManager):  # type: ignore[misc]  # Ray gives no type
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._gaps = ReplicaGaps()
        super().__init__(*args, **kwargs)
        self._unanswered = 0  # Checks in a row that HAProxy has not answered,
        self._idle = 0  # and those of them between which it has not run either.
        self._activity: Activity | None = None
        self._watching = self.event_loop.create_task(self._watch())

    def update_target_groups(self, target_groups: Sequence[Any]) -> None:
        """Takes the applications and their replicas from the controller. HAProxy is reloaded with them, and with the
        time after which clients should try again.

        An application that is being deleted has neither replicas nor a deployment that takes requests. It is left out,
        so that no request waits for it."""
        target_groups = [group for group in target_groups if group.targets or group.ingress_deployment_name]
        with_replicas = {group.app_name for group in target_groups if group.targets}
        self._gaps.update({group.app_name for group in target_groups}, with_replicas)
        os.environ[EXPECTED_VARIABLE] = str(self._gaps.expected_s)
        super().update_target_groups(target_groups)

    async def _update_haproxy_backends(self) -> None:
        """Updates HAProxy only once the replicas are known. Serve's fallback may be known before them, and HAProxy
        would then forget the replicas that it has."""
        if self._received_target_groups_broadcast:
            await super()._update_haproxy_backends()

    async def shutdown(self) -> None:
        self._watching.cancel()
        await super().shutdown()

    async def _watch(self) -> None:
        await self._haproxy_start_task
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._look()
            except Exception:  # Whatever it was, HAProxy must still be watched.
                logger.exception("HAProxy could not be checked; this is tried again.")

    async def _look(self) -> None:
        """Checks HAProxy once, and replaces it if it is lost. Waits while HAProxy is reloaded, since Serve then
        watches the new process itself."""
        async with self._reload_lock:
            stats = await self._ask_stats()
            if stats is None:
                if self._is_lost():
                    await self._replace()
                return
        await free_waiting(stats, self._haproxy._send_socket_command)

    async def _ask_stats(self) -> str | None:
        """Returns the output of `show stat`, or None if HAProxy has ended or does not answer in time."""
        if self._haproxy._proc.returncode is not None:
            return None
        try:
            stats = str(await asyncio.wait_for(self._haproxy._send_socket_command("show stat"), ANSWER_S))
        except (TimeoutError, RuntimeError) as error:
            self._count_unanswered()
            logger.warning("HAProxy does not answer (%d times in a row): %r", self._unanswered, error)
            return None
        self._forget()
        return stats

    def _count_unanswered(self) -> None:
        """Counts checks, not seconds. If the machine is overloaded or was suspended, a late answer shows no fault of
        HAProxy, so checks between which HAProxy has run are counted separately."""
        self._unanswered += 1
        before, self._activity = self._activity, Activity.of(self._haproxy._proc.pid)
        self._idle = self._idle + 1 if self._activity == before else 0

    def _is_lost(self) -> bool:
        has_ended = self._haproxy._proc.returncode is not None
        return has_ended or self._idle >= MAX_IDLE or self._unanswered >= MAX_UNANSWERED

    def _forget(self) -> None:
        self._unanswered, self._idle, self._activity = 0, 0, None

    async def _replace(self) -> None:
        process = self._haproxy._proc
        if process.returncode is None:
            process.kill()
        logger.error("HAProxy ended with status %s; another one is being started.", await process.wait())
        self._haproxy._proc = await self._haproxy._start_and_wait_for_haproxy()
        self._forget()


@dataclass(frozen=True, slots=True)
class Activity:
    """The time that a process has run and has waited for a processor. It stays the same while the process sleeps."""

    run_ns: int
    waited_ns: int
    num_runs: int

    @classmethod
    def of(cls, pid: int) -> Activity:
        """Sums the schedstat files of proc(5) over the threads of a process. Returns zeros if the process has ended."""
        found = [_schedstat(path) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
        return cls(*(sum(numbers) for numbers in zip(*found, strict=True))) if found else cls(0, 0, 0)


def _schedstat(path: Path) -> list[int]:
    try:
        return [int(number) for number in path.read_text().split()]
    except OSError:  # The thread has just ended.
        return [0, 0, 0]


Manager = ray.remote(num_cpus=0)(WatchedHAProxyManager)
