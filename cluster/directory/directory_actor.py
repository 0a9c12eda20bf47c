"""The adapter directory as a named Ray actor, and the client through which other processes reach it.

There is one actor for each application and base model, created by the first process that needs it. It exits by itself
when no replica has called for a while, so a deleted application leaves nothing behind but its catalogue.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import resource
import secrets
import sys
import time
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lorafleet.cluster.admin.administration import Administration
from lorafleet.cluster.catalogue.catalogue import Catalogue, keep_reading
from lorafleet.cluster.catalogue.catalogue_store import open_store
from lorafleet.cluster.console.console_calls import ConsoleCall
from lorafleet.cluster.console.directory_view import DirectoryWindow
from lorafleet.cluster.directory.directory import AdapterDirectory
from lorafleet.cluster.directory.directory_calls import ANSWER_S, DirectoryCall, ReadProgressCall, SocketCall
from lorafleet.cluster.directory.directory_messages import Progress
from lorafleet.cluster.directory.directory_socket import Address, DirectoryConnection, DirectoryServer
from lorafleet.cluster.directory.placer import ROUND_S
from lorafleet.cluster.serve.state_folder import state_folder
from lorafleet.protocol.admin_verbs import Verb
from lorafleet.protocol.errors import LorafleetError
from lorafleet.resolvers.private_files import keep_private

NAMESPACE = "lorafleet"
IDLE_EXIT_S = 30.0
ADMINISTER_S = 660.0  # Longer than membership.CHANGE_S, so that a change is never repeated because it took long.
MAX_CALLS = 10_000  # Calls at a time: every replica and router has one or two in flight.
HEAD_NODE = "node:__internal_head__"  # A resource that Ray gives to the head node.

LOAD_AGAIN_S = 2.0
READ_ON_S = 1.0  # Seconds between reads of the log for changes by other directories of the same catalogue.
COLLECT_S = 3600.0  # Seconds between searches for files that nothing names.
SWITCH_S = 0.0001  # Seconds for which a thread may block the event loop with the GIL; Python's default is 5 ms.
MOVED_S = 3.0  # After so many silent seconds the directory may run elsewhere, so Ray is asked where.

T = TypeVar("T")

logger = logging.getLogger("lorafleet.cluster")


@dataclass(frozen=True, slots=True)
class DirectoryPlace:
    """The identity of a directory and the place of its catalogue: all that is needed to reach or to create it."""

    app_name: str
    model: str
    catalog_uri: str | None
    base_names: tuple[str, ...]
    fill_cpu_loras: bool
    places_by_demand: bool = True  # False leaves adapters where requests bring them; pins are placed in any case.

    @property
    def actor_name(self) -> str:
        return f"directory:{self.app_name}:{self._model_id}"

    @property
    def uri(self) -> str:
        """The catalogue's URI, by default a folder of its own under the state directory."""
        return self.catalog_uri or str(state_folder() / "catalogues" / f"{self.app_name}-{self._model_id}")

    @property
    def _model_id(self) -> str:
        return hashlib.sha256(self.model.encode()).hexdigest()[:12]


class DirectoryActor:
    """Runs AdapterDirectory and Administration in their own process. It does not inherit from them, since Ray would
    wrap each of their methods."""

    def __init__(
        self, catalog_uri: str, base_names: tuple[str, ...], fill_cpu_loras: bool, places_by_demand: bool, secret: str
    ) -> None:
        keep_private()
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # A thousand replicas have a connection each.
        self._directory = AdapterDirectory(
            Catalogue(open_store(catalog_uri)), fill_cpu_loras=fill_cpu_loras, places_by_demand=places_by_demand
        )
        self._administration = Administration(self._directory, base_names)
        self._window = DirectoryWindow(self._directory)
        loop = asyncio.get_event_loop()
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # Ray's
        self._server = DirectoryServer(self._directory, host, ray.get_runtime_context().get_actor_id() or "", secret)
        self._watchdog = loop.create_task(self._watch())
        self._placing = loop.create_task(self._keep_placing())
        self._caring: list[asyncio.Task[None]] = []

    async def address(self) -> Address:
        """Returns the address that answers join, report, routes and watch."""
        return self._server.address

    async def ask(self, call: DirectoryCall[T]) -> T:
        return await call.answered_by(self._directory)

    async def administer(self, verb: Verb[T]) -> T:
        """Carries out a verb of administration, once the catalogue is loaded."""
        await self._directory.epoch.until_loaded()
        return await self._administration.carry_out(verb)

    async def look(self, call: ConsoleCall[T]) -> T:
        await self._directory.epoch.until_loaded()
        return await call.answered_by(self._window)

    async def _keep_placing(self) -> None:
        while True:
            await asyncio.sleep(ROUND_S)
            await self._directory.placement.place()

    async def _keep_collecting(self) -> None:
        while True:
            await asyncio.sleep(COLLECT_S)
            try:
                await self._administration.collect_files()
            except LorafleetError as error:
                logger.warning("unused files could not be collected; they are collected later: %s", error)

    async def _load(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                with _quick_switches():
                    await self._directory.load()
            except Exception:
                logger.exception("the catalogue cannot be read")
                await asyncio.sleep(LOAD_AGAIN_S)
            else:
                self._administration.resume()
                reading = keep_reading(self._directory.catalogue, READ_ON_S)
                self._caring = [loop.create_task(work) for work in (reading, self._keep_collecting())]
                return

    async def _watch(self) -> None:
        await self._server.start()
        await self._load()
        idle_s = 0.0
        while idle_s < IDLE_EXIT_S:
            await asyncio.sleep(1.0)
            self._directory.tick()
            idle_s = idle_s + 1.0 if self._directory.idle else 0.0
        logger.info("no replica is left; the adapter directory exits")
        ray.kill(ray.get_runtime_context().current_actor)


@contextlib.contextmanager
def _quick_switches() -> Iterator[None]:
    """Shortens the time for which a thread may hold the GIL. The event loop releases the GIL with every system call,
    and a thread that reads a catalogue would then hold it for 5 ms: a thousand replicas would wait for minutes."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def get_or_create(place: DirectoryPlace) -> RemoteDirectory:
    # A local folder is on the head node, wherever the caller runs. With S3 the head node is only preferred: it is not
    # removed when the load drops, and has no GPU to keep busy.
    in_s3 = place.uri.startswith("s3://")
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
            resources={} if in_s3 else {HEAD_NODE: 0.001},
            # Without a strategy, it would inherit the calling replica's own and run in its placement group.
            scheduling_strategy=_rather_on_head() if in_s3 else "DEFAULT",
            max_concurrency=MAX_CALLS,
            # Otherwise Ray's head would record each of the last 100 000 calls: 200 MB.
            enable_task_events=False,
        )
        .remote(place.uri, place.base_names, place.fill_cpu_loras, place.places_by_demand, secrets.token_hex(16))
    )
    return RemoteDirectory(actor)


def _rather_on_head() -> NodeAffinitySchedulingStrategy | str:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]  # Ray's own omission
    head = next((node["NodeID"] for node in nodes if node["Alive"] and HEAD_NODE in node["Resources"]), None)
    return "DEFAULT" if head is None else NodeAffinitySchedulingStrategy(head, soft=True)


class RemoteDirectory:
    """Implements directory_calls.Directory over the actor and its socket. It raises the actor's own exceptions, and
    TimeoutError if the actor does not answer in time."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._address: Address | None = None
        self._connection: DirectoryConnection | None = None
        self._connecting = asyncio.Lock()
        self._answered_s = 0.0

    async def ask(self, call: DirectoryCall[T]) -> T:
        """Makes a call, through the transport that its declaration names."""
        if not isinstance(call, SocketCall):
            return await _result(self._actor.ask.remote(call), call.limit_s)
        connection = await self._connected()
        answer: T = await connection.ask(call)
        self._answered_s = time.monotonic()
        return answer

    def ask_soon(self, call: DirectoryCall[None]) -> None:
        """Makes a call from code that is not asyncio, and ignores the outcome."""
        self._actor.ask.remote(call)

    def ask_from_thread(self, call: DirectoryCall[T], limit_s: float) -> T:
        """Makes a call and waits for its answer at most limit_s seconds, in a thread that has no event loop."""
        answer: T = ray.get(self._actor.ask.remote(call), timeout=limit_s)
        return answer

    async def look(self, call: ConsoleCall[T]) -> T:
        return await _result(self._actor.look.remote(call))

    async def administer(self, verb: Verb[T]) -> T:
        return await _result(self._actor.administer.remote(verb), ADMINISTER_S)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    async def _connected(self) -> DirectoryConnection:
        async with self._connecting:
            if self._connection is None or self._connection.closed:
                self._connection = await self._connect()
            return self._connection

    async def _connect(self) -> DirectoryConnection:
        """Connects to the directory. A restarted directory is nearly always where it was, and answers there before it
        answers Ray's calls."""
        if self._address is None or time.monotonic() - self._answered_s > MOVED_S:
            self._address = await _address_of(self._actor)
        return await DirectoryConnection.open(self._address)


def read_progress(name: str, after: int) -> list[Progress]:
    """Returns the steps after the first `after` steps, or nothing while there is no directory yet."""
    try:
        actor: Any = ray.get_actor(name, namespace=NAMESPACE)
        steps: list[Progress] = ray.get(actor.ask.remote(ReadProgressCall(after)), timeout=ANSWER_S)
    except (ValueError, RayError):
        return []
    return steps


async def _address_of(actor: Any) -> Address:
    address: Address = await _result(actor.address.remote())
    return address


async def _result(reference: Awaitable[T], limit_s: float = ANSWER_S) -> T:
    """Waits for an answer of the actor. Raises TimeoutError after limit_s seconds, since a stopped process never
    answers."""
    try:
        return await asyncio.wait_for(reference, limit_s)
    except RayTaskError as error:
        raise error.cause from None
