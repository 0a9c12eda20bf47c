"""The answers to the verbs of administration (admin_verbs.py), as the HTTP API sends them and as clients get them.

A client ignores fields that a later server adds.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Split = dict[str, float]  # version -> weight


class Version(msgspec.Struct, frozen=True, omit_defaults=True):
    """One immutable version of an adapter."""

    number: int
    digest: str
    source: str  # Its origin, for people.
    rank: int
    num_bytes: int  # Size in the serving dtype.
    created_s: float  # Seconds since 1970.
    location: str = ""  # Folder that replicas read if the catalogue has no copy.
    base_model_name: str | None = None
    metadata: dict[str, str] = {}
    left_out: tuple[str, ...] = ()  # Its parts for pictures or sound, which are not served, such as "visual".
    stored_bytes: int = 0  # Size of its files in the catalogue, which counts for the tenant's limit; 0 if it has none.


class Move(msgspec.Struct, frozen=True):
    """A change of an alias to a new split."""

    at_s: float  # Seconds since 1970.
    split: Split


class Alias(msgspec.Struct, frozen=True):
    """The split of an alias, and the changes that led to it."""

    split: Split
    history: list[Move]  # The last entry is the present split.


class Adapter(msgspec.Struct, frozen=True):
    id: str  # The adapter's name, in the words of the caller.
    object: Literal["adapter"]
    tenant: str | None
    pinned_replicas: int  # 0: not pinned
    removing: bool
    versions: list[Version]
    aliases: dict[str, Alias]

    @property
    def name(self) -> str:
        return self.id


class PushedVersion(msgspec.Struct, frozen=True):
    """The version that a push from memory has made, or found to be there already."""

    id: str  # The adapter's name, in the words of the caller.
    object: Literal["adapter.version"]
    version: int
    digest: str


class AdapterPage(msgspec.Struct, frozen=True):
    object: Literal["list"]
    data: list[Adapter]
    has_more: bool
    last_id: str | None


class Removed(msgspec.Struct, frozen=True):
    object: Literal["adapter"]
    id: str
    removed: Literal[True]


class Prefetched(msgspec.Struct, frozen=True):
    """The result of a prefetch."""

    id: str
    replicas: list[str]  # Replicas that have the adapter now.


class Verified(msgspec.Struct, frozen=True):
    id: str
    verified: list[int]  # Numbers of versions.


class Downloaded(msgspec.Struct, frozen=True):
    """The result of a download, as the client gives it. Over HTTP come the files, and version and digest as headers."""

    id: str
    version: int | None  # None: a resolver found the adapter, so it has no versions.
    digest: str
    num_bytes: int  # Size of the files.
    folder: str  # Absolute path of the folder on the client's machine.
