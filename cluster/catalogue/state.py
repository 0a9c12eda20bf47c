"""What the log's entries add up to, in memory: adapters by name, and what each public name stands for. Pure."""

from __future__ import annotations

import hashlib
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterator

import msgspec

from lorafleet.cluster.catalogue.log import Entry
from lorafleet.cluster.catalogue.records import Adapter, Removed, Version
from lorafleet.workers.lora.request import LoRARequest


class Served(msgspec.Struct, frozen=True):
    """What a public name stands for: versions and their weights.

    since: the directory's version in which it became so; later ones are newer. found: by a resolver, and not in the
    catalogue.
    """

    name: str
    since: int
    loras: tuple[LoRARequest, ...]
    weights: tuple[float, ...]
    found: bool = False

    def draw(self, key: str | None) -> LoRARequest:
        """A version in proportion to its weight; for one key always the same."""
        if len(self.loras) == 1:
            return self.loras[0]
        point = (random.random() if key is None else _uniform(self.name, key)) * sum(self.weights)
        for lora, weight in zip(self.loras, self.weights, strict=True):
            point -= weight
            if point < 0:
                return lora
        return self.loras[-1]


class CatalogueState:
    """files_uri: where the store keeps the files of a digest."""

    def __init__(self, files_uri: Callable[[str], str]) -> None:
        self.adapters: dict[str, Adapter] = {}
        self.pinned: set[str] = set()  # names
        self._files_uri = files_uri
        self._removed: dict[str, Removed] = {}
        self._owner: dict[str, str] = {}  # of an alias: its adapter
        self._uses: Counter[str] = Counter()  # of a digest, by versions
        self._stored: Counter[str] = Counter()  # the same, of those whose files are in the store

    def apply(self, entry: Entry) -> set[str]:
        """The public names that may stand for something else now."""
        before = self.adapters.pop(entry.name, None)
        changed = set(before.aliases) if before else set()
        for alias in changed:
            del self._owner[alias]
        self._uses.subtract(version.digest for version in _in_use(before))
        self._stored.subtract(version.digest for version in _in_use(before) if not version.location)
        self.pinned.discard(entry.name)
        self._removed.pop(entry.name, None)
        if isinstance(entry, Removed):
            self._removed[entry.name] = entry
            return changed
        self.adapters[entry.name] = entry
        self._owner |= dict.fromkeys(entry.aliases, entry.name)
        self._uses.update(version.digest for version in _in_use(entry))
        self._stored.update(version.digest for version in _in_use(entry) if not version.location)
        if entry.pinned_replicas:
            self.pinned.add(entry.name)
        return changed | set(entry.aliases)

    def owner(self, alias: str) -> Adapter | None:
        name = self._owner.get(alias)
        return None if name is None else self.adapters[name]

    def aliases(self) -> Iterator[str]:
        return iter(self._owner)

    def removed(self, name: str) -> Removed | None:
        return self._removed.get(name)

    def num_uses(self, digest: str) -> int:
        """Versions that have these bytes, of all adapters that are not on their way out."""
        return self._uses[digest]

    def num_stored(self, digest: str) -> int:
        """Those of them that need the store's files."""
        return self._stored[digest]

    def served(self, alias: str, since: int) -> Served | None:
        adapter = self.owner(alias)
        if adapter is None:
            return None
        shares = adapter.shares(alias)
        loras = tuple(self.request(alias, adapter.version(share.version)) for share in shares)
        return Served(alias, since, loras, tuple(share.weight for share in shares))

    def request(self, name: str, version: Version) -> LoRARequest:
        path = version.location or self._files_uri(version.digest)
        return LoRARequest(name, adapter_number(name), path, version.digest, version.base_model_name)


def _in_use(adapter: Adapter | None) -> tuple[Version, ...]:
    return () if adapter is None or adapter.removing else adapter.versions


def adapter_number(name: str) -> int:
    """A positive number for callers that want one; the digest is the identity."""
    return 1 + zlib.crc32(name.encode()) % (2**31 - 2)


def _uniform(name: str, key: str) -> float:
    """In [0, 1), alike in every process; independent for each name, so that splits do not move together."""
    drawn = hashlib.blake2b(f"{name}\0{key}".encode(), digest_size=7).digest()
    return int.from_bytes(drawn) / (1 << 56)
