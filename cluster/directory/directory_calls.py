"""The calls of replicas and routers to the directory. Each is declared once: its request is the fields, the type of its
answer is in the brackets, its base class says the transport, and answered_by() says which part answers it.

RemoteDirectory (directory_actor.py) sends a call from another process. AdapterDirectory answers it in its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, TypeVar

import msgspec

from lorafleet.cluster.directory.directory_messages import Changes, Found, Progress
from lorafleet.cluster.directory.directory_metrics import DirectoryCounts
from lorafleet.cluster.directory.directory_timing import TIMING
from lorafleet.cluster.directory.neighbors import Neighbor
from lorafleet.cluster.directory.residency import Report, Routes
from lorafleet.cluster.tenancy.quota_book import Ask, Verdict
from lorafleet.protocol.errors import WireError
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest
from lorafleet.resolvers.neighbor_wire import NeighborAddress

if TYPE_CHECKING:
    from lorafleet.cluster.directory.directory import AdapterDirectory

ANSWER_S = 5.0  # Longer than most calls are held: a peer that is silent for so long is gone, perhaps with its node.

Answer = TypeVar("Answer")


class DirectoryCall(msgspec.Struct, Generic[Answer], frozen=True):
    """A call that is made through Ray."""

    limit_s: ClassVar[float] = ANSWER_S  # Seconds after which the caller stops waiting.

    async def answered_by(self, directory: AdapterDirectory) -> Answer:
        raise NotImplementedError


class SocketCall(DirectoryCall[Answer], frozen=True, array_like=True, tag=True):
    """A call that is made through the directory's socket, since it is made many times a second, or by all replicas at
    once."""


class Directory(Protocol):
    """Takes calls to the directory. AdapterDirectory answers them, and RemoteDirectory sends them to its process."""

    async def ask(self, call: DirectoryCall[Answer]) -> Answer: ...


class JoinCall(SocketCall[Changes], frozen=True):
    """Registers a replica; see CopyLeases.join."""

    replica_id: str
    epoch: str
    names: list[str]
    found: list[LoRARequest]
    ready: bool
    neighbor: Neighbor | None = None  # The replica's server for other nodes; None: it has none.

    async def answered_by(self, directory: AdapterDirectory) -> Changes:
        directory.neighbors.register(self.replica_id, self.neighbor)
        return directory.leases.join(self.replica_id, self.epoch, self.names, self.found, self.ready)


class WatchCall(SocketCall[Changes], frozen=True):
    """Polls for changes and orders; see CopyLeases.watch."""

    replica_id: str
    epoch: str
    version: int
    order: int

    async def answered_by(self, directory: AdapterDirectory) -> Changes:
        return await directory.leases.watch(self.replica_id, self.epoch, self.version, self.order)


class DoneCall(DirectoryCall[None], frozen=True):
    """Says how an order ended at its replica."""

    replica_id: str
    epoch: str
    order: int
    info: AdapterInfo | None
    error: WireError | None

    async def answered_by(self, directory: AdapterDirectory) -> None:
        directory.epoch.check(self.epoch)
        directory.replicas.end_order(self.replica_id, self.order, self.info, self.error)


class DrainCall(DirectoryCall[None], frozen=True):
    """Hands over the adapters of a replica that is being stopped; see PlacementRounds.drain."""

    limit_s: ClassVar[float] = TIMING.hand_over_s + ANSWER_S
    replica_id: str

    async def answered_by(self, directory: AdapterDirectory) -> None:
        await directory.placement.drain(self.replica_id)


class LeaveCall(DirectoryCall[None], frozen=True):
    """Removes a replica that stops."""

    replica_id: str

    async def answered_by(self, directory: AdapterDirectory) -> None:
        directory.replicas.forget(self.replica_id)


class LookupCall(DirectoryCall[Found], frozen=True):
    """Returns what a name stands for."""

    epoch: str
    name: str

    async def answered_by(self, directory: AdapterDirectory) -> Found:
        return await directory.names.lookup(self.epoch, self.name)


class FoundCall(DirectoryCall[Found], frozen=True):
    """Records what a resolver has found; see AdapterNames.record_found."""

    epoch: str
    lora: LoRARequest

    async def answered_by(self, directory: AdapterDirectory) -> Found:
        return await directory.names.record_found(self.epoch, self.lora)


class ListCall(DirectoryCall[list[LoRARequest]], frozen=True):
    """Returns a page of adapters; see AdapterNames.list_loras."""

    epoch: str
    after: str
    end: str
    limit: int

    async def answered_by(self, directory: AdapterDirectory) -> list[LoRARequest]:
        return await directory.names.list_loras(self.epoch, self.after, self.end, self.limit)


class ReportCall(SocketCall[bool], frozen=True):
    """Reports what a replica holds, and returns whether the report was accepted; see RouteBroadcast.accept."""

    report: Report

    async def answered_by(self, directory: AdapterDirectory) -> bool:
        return directory.routers.accept(self.report)


class RoutesCall(SocketCall[Routes], frozen=True):
    """Polls for routes; see RouteBroadcast.routes."""

    epoch: str
    version: int

    async def answered_by(self, directory: AdapterDirectory) -> Routes:
        return await directory.routers.routes(self.epoch, self.version)


class NeighborsCall(DirectoryCall[list[NeighborAddress]], frozen=True):
    """Returns the addresses of other nodes that probably have an adapter's files; see Neighbors.of."""

    replica_id: str
    digest: str

    async def answered_by(self, directory: AdapterDirectory) -> list[NeighborAddress]:
        return directory.neighbors.of(self.replica_id, self.digest)


class AdmitCall(DirectoryCall[list[Verdict]], frozen=True):
    """Admits or rejects requests against the quotas, which count the requests of all replicas; see
    QuotaBook.admit."""

    replica_id: str
    asks: list[Ask]
    charges: dict[str, int]
    running: dict[str, int]

    async def answered_by(self, directory: AdapterDirectory) -> list[Verdict]:
        return directory.quotas.admit(self.replica_id, self.asks, self.charges, self.running)


class CountsCall(DirectoryCall[DirectoryCounts], frozen=True):
    """Returns the counts for /metrics."""

    async def answered_by(self, directory: AdapterDirectory) -> DirectoryCounts:
        return directory.counts()


class ProgressCall(DirectoryCall[None], frozen=True):
    """Publishes a step of a replica's start."""

    progress: Progress

    async def answered_by(self, directory: AdapterDirectory) -> None:
        directory.progress.append(self.progress)


class ReadProgressCall(DirectoryCall[list[Progress]], frozen=True):
    """Returns the steps after the first `after` steps."""

    after: int

    async def answered_by(self, directory: AdapterDirectory) -> list[Progress]:
        return directory.progress[self.after :]


AnySocketCall = JoinCall | WatchCall | ReportCall | RoutesCall
