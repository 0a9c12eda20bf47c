"""What the log's entries add up to, and how little of it is kept."""

from __future__ import annotations

import random
import tracemalloc

import msgspec

from lorafleet.cluster.catalogue.catalogue_records import (
    AdapterRecord,
    Entry,
    RemovalRecord,
    Share,
    VersionRecord,
    moved,
)
from lorafleet.cluster.catalogue.catalogue_state import CatalogueState
from lorafleet.cluster.catalogue.packed import pack


def version(number: int, digest: str, location: str = "") -> VersionRecord:
    return VersionRecord(number, digest, "s3://trainers/sql", 16, 84_000_000, 1e9, location, "llama")


def adapter(name: str, *versions: VersionRecord, serves: int = 1, alias: str | None = None) -> AdapterRecord:
    return moved(AdapterRecord(name, versions), alias or name, (Share(serves, 1.0),), 1e9)


def state(*entries: Entry) -> CatalogueState:
    built = CatalogueState(lambda digest: f"/catalogue/{digest}")
    for entry in entries:
        built.apply(pack(entry))
    return built


def test_bytes_are_found_by_all_who_use_them_until_the_last_one_goes() -> None:
    built = state(adapter("a", version(1, "x"), version(2, "x")), adapter("b", version(1, "x", "/b"), version(2, "y")))
    assert [one.number for one in built.versions("x")] == [1, 2, 1]
    assert built.names("x") == ["a", "b"]
    assert built.names("y") == [], "no alias stands for it"
    built.apply(pack(RemovalRecord("a")))
    assert [one.location for one in built.versions("x")] == ["/b"]
    built.apply(pack(adapter("b", version(2, "y"), serves=2)))
    assert (built.versions("x"), built.names("x"), built.names("y")) == ([], [], ["b"])


def test_an_adapter_that_is_being_removed_uses_nothing_and_is_known_as_such() -> None:
    there = adapter("a", version(1, "x"))
    gone = msgspec.structs.replace(there, aliases={}, removing=True)
    built = state(there, gone)
    assert (built.versions("x"), built.removing, built.owner("a")) == ([], {"a"}, None)
    built.apply(pack(RemovalRecord("a", "run")))
    assert (built.removing, built.removed("a")) == (set(), RemovalRecord("a", "run"))


def test_any_order_of_changes_adds_up_to_what_the_last_ones_say() -> None:
    rng = random.Random(0)
    built, last = state(), dict[str, Entry]()
    for _ in range(500):
        name = rng.choice("abcdef")
        versions = [version(n, rng.choice("uvwxyz")) for n in range(1, rng.randint(2, 4))]
        entry: Entry = adapter(
            name, *versions, serves=rng.randint(1, len(versions)), alias=rng.choice((name, name * 2))
        )
        if rng.random() < 0.3:
            entry = RemovalRecord(name)
        last.pop(name, None)
        last[name] = entry
        built.apply(pack(entry))
    fresh = state(*last.values())
    assert dict(built.adapters) == {name: entry for name, entry in last.items() if isinstance(entry, AdapterRecord)}
    assert set(built.aliases()) == set(fresh.aliases())
    for digest in "uvwxyz":
        assert sorted(built.names(digest)) == sorted(fresh.names(digest))
        assert len(built.versions(digest)) == len(fresh.versions(digest))


def test_an_adapter_takes_less_than_700_bytes() -> None:
    built, packed = state(), [pack(adapter(f"adapter-{i}", version(1, f"{i:064x}"))) for i in range(10_000)]
    tracemalloc.start()
    try:
        for one in packed:
            built.apply(bytes(memoryview(one)))  # a copy, so that it counts
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken / len(packed) < 700
