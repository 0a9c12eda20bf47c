"""The catalogue's state in memory, built from the log's entries. It finds adapters by name, the versions behind a
public name, and the adapters that use the same bytes.

It does no I/O. It is made for a million adapters, so it does not store what unpacking one or two of them can tell.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterator

import msgspec

from lorafleet.cluster.catalogue.catalogue_records import (
    AdapterRecord,
    Entry,
    RemovalRecord,
    VersionRecord,
    stored_bytes_of,
)
from lorafleet.cluster.catalogue.name_index import NameIndex
from lorafleet.cluster.catalogue.packed import Packed, PackedAdapters, unpack
from lorafleet.protocol.lora_request import LoRARequest, adapter_number
from lorafleet.protocol.names import tenant_of


class Served(msgspec.Struct, frozen=True):
    """The versions that a public name stands for, and their weights."""

    name: str
    adapter: str  # Name of the adapter.
    since: int  # The directory's version in which this became true; larger versions are newer.
    loras: tuple[LoRARequest, ...]
    weights: tuple[float, ...]
    found: bool = False  # A resolver has found it, and it is not in the catalogue.

    def draw(self, key: str | None) -> LoRARequest:
        """Draws a version with a probability proportional to its weight. The same key always draws the same version."""
        if len(self.loras) == 1:
            return self.loras[0]
        point = (random.random() if key is None else _uniform(self.name, key)) * sum(self.weights)
        for lora, weight in zip(self.loras, self.weights, strict=True):
            point -= weight
            if point < 0:
                return lora
        return self.loras[-1]


class CatalogueState:
    """The state of the catalogue. `files_uri` returns where the store holds the files of a digest."""

    def __init__(self, files_uri: Callable[[str], str]) -> None:
        self.adapters = PackedAdapters()
        self.adapter_names = NameIndex()
        self.alias_names = NameIndex()
        self.pinned: set[str] = set()  # Names of pinned adapters.
        self.removing: set[str] = set()  # Names of adapters that are being removed.
        self.seeded: dict[str, str] = {}  # Adapters of lora_modules, also removed ones -> AdapterRecord.seeded_by.
        self._owned: dict[str, dict[str, int]] = {}  # Tenant -> adapter -> its bytes.
        self._files_uri = files_uri
        self._removed: dict[str, RemovalRecord] = {}  # Removed adapters that an application would bring back.
        self._owner: dict[str, str] = {}  # Alias -> adapter.
        self._users: dict[str, tuple[str, ...] | str] = {}  # Digest -> its adapters; nearly always a single name.

    def apply(self, packed: Packed) -> set[str]:
        """Applies an entry, and returns the public names that may stand for something else now."""
        entry = unpack(packed)
        name = entry.name
        before = self.adapters.pop(name)
        changed = set(before.aliases) if before else set()
        for alias in changed:
            del self._owner[alias]
        self._index(before, entry)
        for digest in _digests(before):
            self._set_users(digest, tuple(user for user in self.users(digest) if user != name))
        self.pinned.discard(name)
        self.removing.discard(name)
        self._removed.pop(name, None)
        self.seeded.pop(name, None)
        if entry.seeded_by is not None:
            self.seeded[name] = entry.seeded_by
        tenant = tenant_of(name)
        if tenant is not None:
            self.owned(tenant).pop(name, None)
        if isinstance(entry, RemovalRecord):
            if entry.seeded_by is not None:
                self._removed[name] = entry
            return changed
        self.adapters.put(name, packed)
        for alias in entry.aliases:
            self._owner[name if alias == name else alias] = name  # Both share one string.
        for digest in _digests(entry):
            self._set_users(digest, (*self.users(digest), name))
        if tenant is not None:
            self._owned.setdefault(tenant, {})[name] = stored_bytes_of(entry)
        if entry.pinned_replicas:
            self.pinned.add(name)
        if entry.removing:
            self.removing.add(name)
        return changed | set(entry.aliases)

    def _index(self, before: AdapterRecord | None, entry: Entry) -> None:
        now = entry if isinstance(entry, AdapterRecord) else None
        for index, old, new in (
            (self.adapter_names, {before.name} if before else set(), {now.name} if now else set()),
            (self.alias_names, set(before.aliases) if before else set(), set(now.aliases) if now else set()),
        ):
            for name in old - new:
                index.remove(name)
            for name in new - old:
                index.add(name)

    def sort_names(self) -> None:
        """Sorts the names, which may take a second. Called once after a whole log has been applied, when nobody
        waits."""
        self.adapter_names.sort()
        self.alias_names.sort()

    def owner(self, alias: str) -> AdapterRecord | None:
        name = self._owner.get(alias)
        return None if name is None else self.adapters[name]

    def owned(self, tenant: str) -> dict[str, int]:
        """Returns the bytes of each of the tenant's adapters, by full name, also of those that are being removed, since
        their files are still stored."""
        return self._owned.get(tenant, {})

    def owner_name(self, alias: str) -> str | None:
        return self._owner.get(alias)

    def aliases(self) -> Iterator[str]:
        return iter(self._owner)

    def removed(self, name: str) -> RemovalRecord | None:
        """Returns the adapter's removal, or None if there is none or nothing would bring the adapter back."""
        return self._removed.get(name)

    def users(self, digest: str) -> tuple[str, ...]:
        """Returns the names of the adapters that have these bytes and are not being removed."""
        users = self._users.get(digest, ())
        return (users,) if isinstance(users, str) else users

    def versions(self, digest: str) -> list[VersionRecord]:
        """Returns the versions that have these bytes, of all adapters that are not being removed."""
        users = [self.adapters[name] for name in self.users(digest)]
        return [version for user in users for version in user.versions if version.digest == digest]

    def names(self, digest: str) -> list[str]:
        """Returns the aliases that stand for these bytes, or for a share of them."""
        return [
            alias
            for user in (self.adapters[name] for name in self.users(digest))
            for alias in user.aliases
            if any(user.version(share.version).digest == digest for share in user.shares(alias))
        ]

    def served(self, alias: str, since: int) -> Served | None:
        adapter = self.owner(alias)
        if adapter is None:
            return None
        shares = adapter.shares(alias)
        loras = tuple(self.request(alias, adapter.version(share.version)) for share in shares)
        return Served(alias, adapter.name, since, loras, tuple(share.weight for share in shares))

    def request(self, name: str, version: VersionRecord) -> LoRARequest:
        path = version.location or self._files_uri(version.digest)
        number, base = adapter_number(name), version.base_model_name
        origin = version.location or (version.source if _is_place(version.source) else name)
        return LoRARequest(
            name, number, path, version.digest, base, version=version.number, origin=origin, left_out=version.left_out
        )

    def _set_users(self, digest: str, users: tuple[str, ...]) -> None:
        if users:
            self._users[digest] = users[0] if len(users) == 1 else users
        else:
            del self._users[digest]


def _digests(adapter: AdapterRecord | None) -> set[str]:
    return set() if adapter is None or adapter.removing else {version.digest for version in adapter.versions}


def _uniform(name: str, key: str) -> float:
    """Returns a number in [0, 1) that is the same in every process. It is independent for each name, so that splits do
    not move together."""
    drawn = hashlib.blake2b(f"{name}\0{key}".encode(), digest_size=7).digest()
    return int.from_bytes(drawn) / (1 << 56)


def _is_place(source: str) -> bool:
    """Returns whether the origin of a version is a path or URI, and not a word such as "upload"."""
    return os.path.isabs(source) or "://" in source
