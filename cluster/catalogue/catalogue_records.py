"""What the catalogue knows of an adapter, and the changes that can be made to it: plain data and pure functions.

A name that requests give is an alias: it stands for shares of an adapter's versions, and remembers what it stood for
before. Every adapter has the alias of its own name, and may have others. Versions are never changed.
"""

from __future__ import annotations

import msgspec

from lorafleet.protocol.errors import AdapterExists, InvalidRequest, ModelNotFound

MAX_HISTORY = 100  # moves that an alias remembers
MAX_ALIASES = 256  # Aliases of one adapter, its own name among them.


class Version(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """location: the folder that every replica reads it from; "" where the catalogue's store has its files.

    source: where it came from, for people. num_bytes: of its matrices in the serving dtype.
    """

    number: int
    digest: str
    source: str
    rank: int
    num_bytes: int
    created_s: float
    location: str = ""
    base_model_name: str | None = None
    metadata: dict[str, str] = {}


class Share(msgspec.Struct, frozen=True, array_like=True, gc=False):
    version: int
    weight: float


class Move(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What an alias stands for since at_s (seconds since 1970)."""

    at_s: float
    shares: tuple[Share, ...]


class Adapter(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag="adapter"):
    """aliases: name -> its moves, the present one last.

    name: full, see protocol/names.py. It alone says whose the adapter is; tenant repeats it (of a name that is
    nobody's it is a note from before tenants owned anything). seeded_by: the application that listed it in
    lora_modules, so that a restarting replica of the same one leaves alone what was done since. removing: no name
    stands for it any more; replicas are freeing it.
    """

    name: str
    versions: tuple[Version, ...] = ()
    aliases: dict[str, tuple[Move, ...]] = {}
    tenant: str | None = None
    pinned_replicas: int = 0  # 0: not pinned
    seeded_by: str | None = None
    removing: bool = False

    def version(self, number: int) -> Version:
        for one in self.versions:
            if one.number == number:
                return one
        there = ", ".join(str(one.number) for one in self.versions)
        raise InvalidRequest(f"adapter {self.name!r} has no version {number}; it has {there}.", "version")

    def shares(self, alias: str) -> tuple[Share, ...]:
        return self.aliases[alias][-1].shares

    def served(self) -> set[int]:
        """The versions that some alias stands for."""
        return {share.version for moves in self.aliases.values() for share in moves[-1].shares}


class Removed(msgspec.Struct, frozen=True, gc=False, tag="removed"):
    """An adapter that is gone; seeded_by keeps a restarting replica from bringing it back."""

    name: str
    seeded_by: str | None = None


Entry = Adapter | Removed  # of the log: what a name is from then on


def with_version(adapter: Adapter, version: Version) -> Adapter:
    return msgspec.structs.replace(adapter, versions=(*adapter.versions, version))


def num_bytes_of(adapter: Adapter) -> int:
    """Of all its versions, those with the same bytes once."""
    return sum({version.digest: version.num_bytes for version in adapter.versions}.values())


def next_number(adapter: Adapter) -> int:
    return 1 + max((version.number for version in adapter.versions), default=0)


def moved(adapter: Adapter, alias: str, shares: tuple[Share, ...], now_s: float) -> Adapter:
    """The alias stands for these shares from now on. InvalidRequest names a version or a weight that cannot be."""
    if not shares:
        raise InvalidRequest(f"alias {alias!r} must stand for at least one version; name one.", "split")
    for share in shares:
        adapter.version(share.version)
        if not 0 < share.weight < float("inf"):
            raise InvalidRequest(
                f"the weight of version {share.version} is {share.weight}; it must be over 0. Leave the version out "
                "to give it no requests.",
                "split",
            )
    if len({share.version for share in shares}) < len(shares):
        raise InvalidRequest("the split names a version twice; give each once.", "split")
    if alias not in adapter.aliases and len(adapter.aliases) >= MAX_ALIASES:
        raise InvalidRequest(
            f"adapter {adapter.name!r} has {len(adapter.aliases)} aliases; at most {MAX_ALIASES} are allowed. Remove "
            "one that is not needed.",
            "alias",
        )
    moves = (*adapter.aliases.get(alias, ()), Move(now_s, shares))[-MAX_HISTORY:]
    return msgspec.structs.replace(adapter, aliases=adapter.aliases | {alias: moves})


def rolled_back(adapter: Adapter, alias: str) -> Adapter:
    """The alias stands for what it stood for before its last move, which is forgotten."""
    moves = adapter.aliases[alias]
    if len(moves) < 2:
        raise InvalidRequest(
            f"alias {alias!r} has only ever stood for {in_words(moves[-1].shares)}: there is nothing to roll back to.",
            "alias",
        )
    return msgspec.structs.replace(adapter, aliases=adapter.aliases | {alias: moves[:-1]})


def without_alias(adapter: Adapter, alias: str) -> Adapter:
    if alias == adapter.name:
        raise InvalidRequest(f"{alias!r} is the adapter's own name; remove the adapter instead.", "alias")
    if alias not in adapter.aliases:
        raise ModelNotFound(f"adapter {adapter.name!r} has no alias {alias!r}.", "alias")
    return msgspec.structs.replace(adapter, aliases={k: v for k, v in adapter.aliases.items() if k != alias})


def taken(name: str, owner: str) -> AdapterExists:
    return AdapterExists(f"the name {name!r} is an alias of adapter {owner!r}. Choose another.", "name")


def in_words(shares: tuple[Share, ...]) -> str:
    if len(shares) == 1:
        return f"version {shares[0].version}"
    total = sum(share.weight for share in shares)
    return ", ".join(f"version {share.version} ({share.weight / total:.0%})" for share in shares)


def without_versions(adapter: Adapter, numbers: set[int]) -> Adapter:
    """And without the moves to them; no alias may stand for one."""
    served = adapter.served()
    for number in numbers:
        if number in served:
            raise InvalidRequest(f"version {number} of adapter {adapter.name!r} is served; move its aliases first.")
    aliases = {
        alias: tuple(move for move in moves if not any(share.version in numbers for share in move.shares))
        for alias, moves in adapter.aliases.items()
    }
    kept = tuple(version for version in adapter.versions if version.number not in numbers)
    return msgspec.structs.replace(adapter, versions=kept, aliases=aliases)
