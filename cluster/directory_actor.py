"""The adapter directory as a named Ray actor, and how the other processes reach it.

One for each application and base model, made by whoever comes first. It ends by itself when no replica has called for
a while, so that an application that was deleted leaves nothing behind but its catalogue.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError

from lorafleet.cluster.administration import Administration
from lorafleet.cluster.catalogue.catalogue import Catalogue
from lorafleet.cluster.catalogue.store import open_store
from lorafleet.cluster.directory import AdapterDirectory, Changes, Found, Progress
from lorafleet.cluster.directory_metrics import DirectoryCounts
from lorafleet.cluster.directory_socket import Address, DirectoryConnection, DirectoryServer
from lorafleet.cluster.placer import ROUND_S
from lorafleet.cluster.residency import Report, Routes
from lorafleet.workers.errors import WireError
from lorafleet.workers.lora.request import AdapterInfo, LoRARequest

NAMESPACE = "lorafleet"
IDLE_EXIT_S = 30.0
MAX_CALLS = 10_000  # at a time: every replica and router holds one or two
HEAD_NODE = "node:__internal_head__"  # a resource that Ray gives the head node

T = TypeVar("T")

logger = logging.getLogger("lorafleet.cluster")


@dataclass(frozen=True, slots=True)
class DirectoryPlace:
    """Which directory, and where its catalogue is: all that is needed to reach or to make it."""

    app_name: str
    model: str
    catalog_uri: str | None
    base_names: tuple[str, ...]
    fill_cpu_loras: bool

    @property
    def actor_name(self) -> str:
        return f"directory:{self.app_name}:{self._model_id}"

    @property
    def uri(self) -> str:
        """A folder of its own under the state directory where none was configured."""
        return self.catalog_uri or str(state_folder() / "catalogues" / f"{self.app_name}-{self._model_id}")

    @property
    def _model_id(self) -> str:
        return hashlib.sha256(self.model.encode()).hexdigest()[:12]


def state_folder() -> Path:
    """Where what must outlive a restart is kept: LORAFLEET_STATE_DIR, or the XDG base directory for state."""
    own = os.environ.get("LORAFLEET_STATE_DIR")
    xdg = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(own).expanduser() if own else Path(xdg).expanduser() / "lorafleet"


class DirectoryActor(AdapterDirectory):
    """AdapterDirectory and Administration in a process of their own."""

    def __init__(self, catalog_uri: str, base_names: tuple[str, ...], fill_cpu_loras: bool) -> None:
        super().__init__(Catalogue(open_store(catalog_uri)), fill_cpu_loras=fill_cpu_loras)
        self._administration = Administration(self, base_names)
        loop = asyncio.get_event_loop()
        loop.call_soon(self._administration.resume)
        self._server = DirectoryServer(self, ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]  # Ray's
        self._watchdog = loop.create_task(self._watch())
        self._placing = loop.create_task(self._keep_placing())

    async def address(self) -> Address:
        """Where report, routes and watch are answered."""
        return self._server.address

    async def administer(self, verb: str, arguments: dict[str, Any]) -> Any:
        """A public method of Administration."""
        assert not verb.startswith("_"), verb
        return await getattr(self._administration, verb)(**arguments)

    async def _keep_placing(self) -> None:
        while True:
            await asyncio.sleep(ROUND_S)
            await self.place()

    async def _watch(self) -> None:
        await self._server.start()
        idle_s = 0.0
        while idle_s < IDLE_EXIT_S:
            await asyncio.sleep(1.0)
            self.tick()
            idle_s = idle_s + 1.0 if self.idle else 0.0
        logger.info("no replica is left: the adapter directory ends")
        ray.kill(ray.get_runtime_context().current_actor)


def get_or_create(place: DirectoryPlace) -> RemoteDirectory:
    # A local folder is where the head node has it, wherever the caller runs.
    resources = {} if place.uri.startswith("s3://") else {HEAD_NODE: 0.001}
    actor = (
        ray.remote(DirectoryActor)
        .options(
            name=place.actor_name,
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            max_restarts=-1,
            max_task_retries=0,
            num_cpus=0,
            resources=resources,
            scheduling_strategy="DEFAULT",  # a replica's own would put it into that replica's placement group
            max_concurrency=MAX_CALLS,
        )
        .remote(place.uri, place.base_names, place.fill_cpu_loras)
    )
    return RemoteDirectory(actor)


class RemoteDirectory:
    """directory.Directory over the actor and its socket; raises the actor's own exceptions."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._connection: DirectoryConnection | None = None
        self._connecting = asyncio.Lock()

    async def join(
        self, replica_id: str, epoch: str, names: list[str], found: list[LoRARequest], ready: bool
    ) -> Changes:
        return await _result(self._actor.join.remote(replica_id, epoch, names, found, ready))

    async def leave(self, replica_id: str) -> None:
        await _result(self._actor.leave.remote(replica_id))

    async def drain(self, replica_id: str) -> None:
        await _result(self._actor.drain.remote(replica_id))

    async def watch(self, replica_id: str, epoch: str, version: int, order: int) -> Changes:
        return await (await self._connected()).watch(replica_id, epoch, version, order)

    async def done(
        self, replica_id: str, epoch: str, order: int, info: AdapterInfo | None, error: WireError | None
    ) -> None:
        await _result(self._actor.done.remote(replica_id, epoch, order, info, error))

    async def lookup(self, epoch: str, name: str) -> Found:
        return await _result(self._actor.lookup.remote(epoch, name))

    async def found(self, epoch: str, lora: LoRARequest) -> Found:
        return await _result(self._actor.found.remote(epoch, lora))

    async def listed(self, epoch: str) -> list[LoRARequest]:
        return await _result(self._actor.listed.remote(epoch))

    async def administer(self, verb: str, arguments: dict[str, Any]) -> Any:
        return await _result(self._actor.administer.remote(verb, arguments))

    async def report(self, report: Report) -> bool:
        return await (await self._connected()).report(report)

    async def routes(self, epoch: str, version: int) -> Routes:
        return await (await self._connected()).routes(epoch, version)

    async def counts(self) -> DirectoryCounts:
        return await _result(self._actor.counts.remote())

    async def note(self, progress: Progress) -> None:
        await _result(self._actor.note.remote(progress))

    def note_soon(self, progress: Progress) -> None:
        """note, from code that is not asyncio and does not care for the outcome."""
        self._actor.note.remote(progress)

    async def _connected(self) -> DirectoryConnection:
        async with self._connecting:
            if self._connection is None or self._connection.closed:
                address = await _result(self._actor.address.remote())
                self._connection = await DirectoryConnection.open(address)
            return self._connection


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
