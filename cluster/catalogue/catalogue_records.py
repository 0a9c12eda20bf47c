"""The records of adapters in the catalogue, and the changes that can be made to them: plain data and pure functions.

A name in a request is an alias. It stands for shares of an adapter's versions, and records what it stood for before.
Every adapter has an alias with its own name, and may have others. Versions never change.
"""

from __future__ import annotations

import msgspec

from lorafleet.protocol.errors import AdapterExists, InvalidRequest, ModelNotFound

MAX_HISTORY = 100  # Moves recorded for one alias.
MAX_ALIASES = 256  # Aliases of one adapter, including its own name.


class VersionRecord(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One version of an adapter, which never changes."""

    number: int
    digest: str
    source: str  # Origin of the version, for people.
    rank: int
    num_bytes: int  # Bytes of its matrices in the serving dtype.
    created_s: float  # Seconds since 1970.
    location: str = ""  # Folder or URI that every replica reads it from; "" if the catalogue's store has its files.
    base_model_name: str | None = None
    metadata: dict[str, str] = {}
    left_out: tuple[str, ...] = ()  # Its parts for pictures or sound, which are not served, such as "visual".
    # Bytes of all its files in the catalogue's store: weights as they were pushed, tokenizer files, template and draft.
    # 0 if the store has none of them, or if the record is older than this field.
    stored_bytes: int = 0


class Share(msgspec.Struct, frozen=True, array_like=True, gc=False):
    version: int
    weight: float


class AliasMove(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A move of an alias to new shares."""

    at_s: float  # Time of the move, in seconds since 1970.
    shares: tuple[Share, ...]


class AdapterRecord(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag="adapter"):
    """An adapter, with its versions and its aliases."""

    name: str  # Full name, which alone says who owns the adapter; see protocol/names.py.
    versions: tuple[VersionRecord, ...] = ()
    aliases: dict[str, tuple[AliasMove, ...]] = {}  # Alias -> its moves; the last one applies now.
    # Repeats the owner in the name. If nobody owns the name, the value dates from before tenants owned adapters.
    tenant: str | None = None
    pinned_replicas: int = 0  # Number of replicas that pin it; 0: not pinned.
    # Mark of the application that lists it in lora_modules (cluster/admin/listed_adapters.py). A restarting replica of
    # the application leaves later changes alone.
    seeded_by: str | None = None
    removing: bool = False  # No name stands for it any more, and replicas are freeing it.

    def version(self, number: int) -> VersionRecord:
        for version in self.versions:
            if version.number == number:
                return version
        there = ", ".join(str(version.number) for version in self.versions)
        raise InvalidRequest(f"adapter {self.name!r} has no version {number}; it has {there}.", "version")

    def shares(self, alias: str) -> tuple[Share, ...]:
        return self.aliases[alias][-1].shares

    def served(self) -> set[int]:
        """Returns the numbers of the versions that some alias stands for."""
        return {share.version for moves in self.aliases.values() for share in moves[-1].shares}


class RemovalRecord(msgspec.Struct, frozen=True, gc=False, tag="removed"):
    """An adapter that was removed."""

    name: str
    seeded_by: str | None = None  # A restarting replica of this application does not bring the adapter back.


Entry = AdapterRecord | RemovalRecord  # An entry of the log: the state of a name from then on.


def with_version(adapter: AdapterRecord, version: VersionRecord) -> AdapterRecord:
    return msgspec.structs.replace(adapter, versions=(*adapter.versions, version))


def version_of_digest(adapter: AdapterRecord, digest: str) -> VersionRecord | None:
    return next((version for version in adapter.versions if version.digest == digest), None)


def stored_bytes_of(adapter: AdapterRecord) -> int:
    """Returns the bytes that all versions take where they are stored; versions with the same digest count once. Those
    of which the size of the files is not known count with their matrices."""
    return sum({version.digest: version.stored_bytes or version.num_bytes for version in adapter.versions}.values())


def next_number(adapter: AdapterRecord) -> int:
    return 1 + max((version.number for version in adapter.versions), default=0)


def moved(adapter: AdapterRecord, alias: str, shares: tuple[Share, ...], now_s: float) -> AdapterRecord:
    """Returns the adapter with the alias moved to these shares. Raises InvalidRequest, which names the invalid version
    or weight."""
    if not shares:
        raise InvalidRequest(f"alias {alias!r} must stand for at least one version; name one.", "split")
    for share in shares:
        adapter.version(share.version)
        if not 0 < share.weight < float("inf"):
            raise InvalidRequest(
                f"the weight of version {share.version} is {share.weight}; it must be over 0 and finite. Leave the "
                "version out to send it no requests.",
                "split",
            )
    if len({share.version for share in shares}) < len(shares):
        raise InvalidRequest("the split contains a version twice; list each version once.", "split")
    if alias not in adapter.aliases and len(adapter.aliases) >= MAX_ALIASES:
        raise InvalidRequest(
            f"adapter {adapter.name!r} has {len(adapter.aliases)} aliases; at most {MAX_ALIASES} are allowed. Remove "
            "one that is not needed.",
            "alias",
        )
    moves = (*adapter.aliases.get(alias, ()), AliasMove(now_s, shares))[-MAX_HISTORY:]
    return msgspec.structs.replace(adapter, aliases=adapter.aliases | {alias: moves})


def rolled_back(adapter: AdapterRecord, alias: str) -> AdapterRecord:
    """Returns the adapter with the alias as it was before its last move, which is deleted from the history."""
    _check_alias(adapter, alias)
    moves = adapter.aliases[alias]
    if len(moves) < 2:
        raise InvalidRequest(
            f"alias {alias!r} has only ever stood for {in_words(moves[-1].shares)}: there is nothing to roll back to.",
            "alias",
        )
    return msgspec.structs.replace(adapter, aliases=adapter.aliases | {alias: moves[:-1]})


def without_alias(adapter: AdapterRecord, alias: str) -> AdapterRecord:
    if alias == adapter.name:
        raise InvalidRequest(f"{alias!r} is the adapter's own name; remove the adapter instead.", "alias")
    _check_alias(adapter, alias)
    return msgspec.structs.replace(adapter, aliases={k: v for k, v in adapter.aliases.items() if k != alias})


def _check_alias(adapter: AdapterRecord, alias: str) -> None:
    if alias not in adapter.aliases:
        raise ModelNotFound(f"adapter {adapter.name!r} has no alias {alias!r}.", "alias")


def taken(name: str, owner: str) -> AdapterExists:
    return AdapterExists(f"the name {name!r} is an alias of adapter {owner!r}. Choose another name.", "name")


def in_words(shares: tuple[Share, ...]) -> str:
    if len(shares) == 1:
        return f"version {shares[0].version}"
    total = sum(share.weight for share in shares)
    return ", ".join(f"version {share.version} ({share.weight / total:.0%})" for share in shares)


def without_versions(adapter: AdapterRecord, numbers: set[int]) -> AdapterRecord:
    """Returns the adapter without these versions and the moves to them. Raises InvalidRequest if an alias stands for
    one."""
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
