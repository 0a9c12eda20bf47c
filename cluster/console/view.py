"""Defines what the console shows as plain data: the view of the directory, the view of each replica, and their
viewer.

The directory knows adapters and where they are. A replica knows its slots, its traffic and its failures. Data of
other tenants is left out where it is stored, not where it is displayed. All names here are full names;
console_state.py turns them into the viewer's.
"""

from __future__ import annotations

import msgspec

from lorafleet.api.telemetry.recent import Failure, Traffic
from lorafleet.api.telemetry.traffic_history import TrafficReport
from lorafleet.cluster.routing.routing import ReplicaLoad, Tier
from lorafleet.protocol.names import bare_name, in_the_words_of, tenant_of


class Viewer(msgspec.Struct, frozen=True):
    """The caller that looks at the console. It sees public adapters and those of its tenant."""

    tenant: str | None
    sees_all: bool  # True for the operator, and for anyone if there are no keys.

    def may_see(self, full: str) -> bool:
        """Returns whether the viewer may see the adapter of this full name (protocol/names.py)."""
        return self.sees_all or tenant_of(full) in (None, self.tenant)

    def naming(self, full: str) -> str:
        """Returns the viewer's name for the adapter."""
        return full if self.tenant is None else bare_name(full)

    def words(self, text: str) -> str:
        """Replaces the full names in a message by the viewer's, and hides those of other tenants, unless the viewer
        sees all."""
        return text if self.sees_all else in_the_words_of(self.tenant, text)


class ViewQuery(msgspec.Struct, frozen=True):
    """A request for one page of adapters and one page of replicas."""

    search: str = ""
    after: str = ""  # The page begins after this adapter.
    limit: int = 50
    replicas_after: str = ""  # The page begins after this replica.
    replica_limit: int = 24
    replica: str = ""  # Requests this replica alone, instead of a page.
    names: tuple[str, ...] | None = None  # Requests these adapters, in this order, instead of a page.
    public_after: str = ""  # Public names up to this one are left out as well.


ALL_REPLICAS = "*"


class ReplicaQuery(msgspec.Struct, frozen=True):
    """A request for the replicas' reports about themselves."""

    names: list[str]  # Adapters whose traffic is requested, by the names of their requests.
    history_of: str = ""  # Replica whose traffic history is requested; ALL_REPLICAS: all of them; "": none.


class VersionView(msgspec.Struct):
    """One version of an adapter."""

    number: int | None  # None if a resolver found it.
    digest: str
    homes: tuple[str, ...]  # Replicas that placement has chosen for it.
    tiers: dict[str, Tier]  # The tier where it is, by replica.
    rank: int | None = None
    num_bytes: int | None = None
    created_s: float | None = None
    source: str = ""  # Empty unless the viewer sees all.
    metadata: dict[str, str] = {}


class MoveView(msgspec.Struct):
    """One move of an alias."""

    at_s: float  # Seconds since 1970.
    split: dict[str, float]  # Version -> weight.


class AdapterView(msgspec.Struct):
    """One adapter with its versions and aliases."""

    name: str
    versions: list[VersionView]
    aliases: dict[str, list[MoveView]]  # Each with its moves, the present one last.
    pinned_replicas: int = 0
    removing: bool = False
    found: bool = False  # True if a resolver found it and the catalogue does not have it.


class SortOrder(msgspec.Struct):
    """A command that a replica has not completed yet."""

    replica: str
    adapter: str
    digest: str
    kind: str
    since_s: float  # Seconds since 1970.


class ReplicaState(msgspec.Struct):
    """The directory's knowledge of one replica."""

    replica: str
    ready: bool
    draining: bool
    load: ReplicaLoad | None  # None if it is unknown, or the viewer does not see all.
    pinned: list[str]  # Digests that must stay in its slots.


class DirectoryView(msgspec.Struct):
    """The directory's answer to a query."""

    adapters: list[AdapterView]
    has_more: bool
    num_adapters: int | None  # None if it is not counted for this viewer.
    replicas: list[ReplicaState]
    num_replicas: int
    more_replicas: bool
    names: dict[str, str]  # By digest, for what the replicas on this page have and the viewer may see.
    orders: list[SortOrder]
    failures: list[Failure]


class ReplicaView(msgspec.Struct):
    """One replica's report about itself."""

    replica: str
    slots: list[str]  # Digests; "" for an empty slot.
    in_cpu: list[str]  # Digests in host memory.
    cpu_loras: int  # Number of adapters that host memory has room for.
    waiting: list[str]  # Digests that requests wait for.
    num_running: int
    num_waiting: int
    max_num_seqs: int
    kv_used: float  # Share of the KV blocks, from 0 to 1.
    lora_memory_used: float  # Share of the memory for A and B of adapters in slots, from 0 to 1.
    traffic: dict[str, Traffic]  # By the requested names.
    total: Traffic
    failures: list[Failure]
    busiest: list[str]  # Names with the most requests.
    history: TrafficReport | None = None  # None unless it is requested.
