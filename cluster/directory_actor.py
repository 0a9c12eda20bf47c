"""The adapter directory as a named Ray actor, and how the other processes reach it.

One for each application and base model, made by whoever comes first. It ends by itself when no replica has called for
a while, so that an application that was deleted leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError

from lorafleet.cluster.directory import AdapterDirectory, Catalogue, Load, Progress, RouteTable
from lorafleet.workers.lora.request import LoRARequest

NAMESPACE = "lorafleet"
IDLE_EXIT_S = 30.0
MAX_CALLS = 10_000  # at a time: every replica and router holds one or two

T = TypeVar("T")

logger = logging.getLogger("lorafleet.cluster")


class DirectoryActor(AdapterDirectory):
    """AdapterDirectory in a process of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._watchdog = asyncio.get_event_loop().create_task(self._exit_when_idle())

    async def _exit_when_idle(self) -> None:
        idle_s = 0.0
        while idle_s < IDLE_EXIT_S:
            await asyncio.sleep(1.0)
            idle_s = idle_s + 1.0 if self.idle else 0.0
        logger.info("no replica is left: the adapter directory ends")
        ray.kill(ray.get_runtime_context().current_actor)


def directory_name(app_name: str, model: str) -> str:
    return f"directory:{app_name}:{hashlib.sha256(model.encode()).hexdigest()[:12]}"


def get_or_create(name: str) -> RemoteDirectory:
    actor = (
        ray.remote(DirectoryActor)
        .options(
            name=name,
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            max_restarts=-1,
            max_task_retries=0,
            num_cpus=0,
            max_concurrency=MAX_CALLS,
        )
        .remote()
    )
    return RemoteDirectory(actor)


class RemoteDirectory:
    """directory.Directory over the actor; raises the actor's own exceptions."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def join(self, replica_id: str, known: Catalogue | None) -> Catalogue:
        return await _result(self._actor.join.remote(replica_id, known))

    async def leave(self, replica_id: str) -> None:
        await _result(self._actor.leave.remote(replica_id))

    async def watch(self, replica_id: str, epoch: str, version: int) -> Catalogue:
        return await _result(self._actor.watch.remote(replica_id, epoch, version))

    async def lookup(self, epoch: str, name: str) -> LoRARequest | None:
        return await _result(self._actor.lookup.remote(epoch, name))

    async def publish(self, epoch: str, entry: LoRARequest, *, replace: bool, wait: bool) -> LoRARequest:
        return await _result(self._actor.publish.remote(epoch, entry, replace=replace, wait=wait))

    async def seed(self, epoch: str, entry: LoRARequest) -> LoRARequest | None:
        return await _result(self._actor.seed.remote(epoch, entry))

    async def retract(self, epoch: str, name: str) -> None:
        await _result(self._actor.retract.remote(epoch, name))

    async def report(self, replica_id: str, load: Load) -> None:
        await _result(self._actor.report.remote(replica_id, load))

    async def routes(self, version: int) -> RouteTable:
        return await _result(self._actor.routes.remote(version))

    async def note(self, progress: Progress) -> None:
        await _result(self._actor.note.remote(progress))

    def note_soon(self, progress: Progress) -> None:
        """note, from code that is not asyncio and does not care for the outcome."""
        self._actor.note.remote(progress)


def read_progress(name: str, after: int) -> list[Progress]:
    """What was noted since the first `after` notes; nothing while there is no directory yet."""
    try:
        actor: Any = ray.get_actor(name, namespace=NAMESPACE)
        notes: list[Progress] = ray.get(actor.progress.remote(after), timeout=5)
    except (ValueError, RayError):
        return []
    return notes


async def _result(reference: Awaitable[T]) -> T:
    try:
        return await reference
    except RayTaskError as error:
        raise error.cause from None
