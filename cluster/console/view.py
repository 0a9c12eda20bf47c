"""What the console shows, as plain data: of the directory, of each replica, and both put together for one viewer.

The directory knows adapters and where they are; a replica knows its slots, its traffic and its failures. Nobody is told
more than they may see: what is another tenant's is left out where it is kept, not where it is drawn. Names are
full in all of this; console_state.py turns them into the viewer's.
"""

from __future__ import annotations

import msgspec

from lorafleet.api.telemetry.recent import Failure, Traffic
from lorafleet.cluster.routing.routing import ReplicaLoad, Tier
from lorafleet.protocol.names import bare_name, in_the_words_of, tenant_of


class Viewer(msgspec.Struct, frozen=True):
    """sees_all: the operator, or anybody where there are no keys. Others see what is public and their tenant's."""

    tenant: str | None
    sees_all: bool

    def may_see(self, full: str) -> bool:
        """An adapter of this full name (protocol/names.py)."""
        return self.sees_all or tenant_of(full) in (None, self.tenant)

    def naming(self, full: str) -> str:
        """What the viewer calls it."""
        return full if self.tenant is None else bare_name(full)

    def words(self, text: str) -> str:
        """A message with full names in it."""
        return text if self.sees_all else in_the_words_of(self.tenant, text)


class Query(msgspec.Struct, frozen=True):
    """A page of adapters behind the name `after`, and one of replicas. names: these adapters in their order, in the
    place of the page. public_after: public names up to this one are left out besides."""

    search: str = ""
    after: str = ""
    limit: int = 50
    replicas_after: str = ""
    replica_limit: int = 24
    names: tuple[str, ...] | None = None
    public_after: str = ""


class VersionView(msgspec.Struct):
    """homes: replicas where placement wants it. tiers: where it is, by replica. source: for who sees all."""

    number: int | None  # None: a resolver found it
    digest: str
    homes: tuple[str, ...]
    tiers: dict[str, Tier]
    rank: int | None = None
    num_bytes: int | None = None
    created_s: float | None = None
    source: str = ""
    metadata: dict[str, str] = {}


class MoveView(msgspec.Struct):
    """split: version -> weight."""

    at_s: float
    split: dict[str, float]


class AdapterView(msgspec.Struct):
    """aliases: each with its moves, the present one last. found: by a resolver, and not in the catalogue."""

    name: str
    versions: list[VersionView]
    aliases: dict[str, list[MoveView]]
    pinned_replicas: int = 0
    removing: bool = False
    found: bool = False


class Order(msgspec.Struct):
    """What a replica was told to do and has not done yet."""

    replica: str
    adapter: str
    digest: str
    kind: str
    since_s: float  # seconds since 1970


class ReplicaState(msgspec.Struct):
    """As the directory has heard. pinned: digests that it shall keep in slots."""

    replica: str
    ready: bool
    draining: bool
    load: ReplicaLoad | None
    pinned: list[str]


class DirectoryView(msgspec.Struct):
    """names: of what is held by the replicas on this page, as far as the viewer may see it; others are no one's."""

    adapters: list[AdapterView]
    has_more: bool
    num_adapters: int | None  # None: not counted for this viewer
    replicas: list[ReplicaState]
    num_replicas: int
    more_replicas: bool
    names: dict[str, str]
    orders: list[Order]
    failures: list[Failure]


class ReplicaView(msgspec.Struct):
    """One replica of itself. slots: digests, "" for an empty one. traffic: by the names that were asked for."""

    replica: str
    slots: list[str]
    in_cpu: list[str]
    cpu_loras: int  # room in host memory
    waiting: list[str]  # digests that requests wait for
    num_running: int
    num_waiting: int
    max_num_seqs: int
    kv_used: float  # share
    traffic: dict[str, Traffic]
    total: Traffic
    failures: list[Failure]
    busiest: list[str]
