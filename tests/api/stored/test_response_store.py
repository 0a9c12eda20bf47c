"""The store of responses keeps what its bounds allow, and drops the rest."""

from __future__ import annotations

from dataclasses import dataclass

from lorafleet.api.stored.response_store import ResponseStore, StoredResponse


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


def entry(name: str, owner: str = "a", num_bytes: int = 0) -> StoredResponse:
    return StoredResponse(name, owner, b"", b"x" * num_bytes, b"{}")


def stored(store: ResponseStore, *names: str, owner: str = "a") -> list[str]:
    return [name for name in names if store.get(owner, name) is not None]


def test_the_owner_with_most_bytes_loses_its_oldest_response() -> None:
    store = ResponseStore(max_bytes=40_000)
    store.put(entry("theirs", "b", 1000))
    for name in ("1", "2", "3", "4"):
        store.put(entry(name, num_bytes=10_000))
    assert stored(store, "1", "2", "3", "4") == ["2", "3", "4"]
    assert stored(store, "theirs", owner="b") == ["theirs"]
    assert stored(store, "theirs") == []


def test_a_response_that_is_larger_than_the_store_is_not_stored() -> None:
    store = ResponseStore(max_bytes=10_000)
    store.put(entry("large", num_bytes=20_000))
    assert stored(store, "large") == []
    store.put(entry("small"))
    assert stored(store, "small") == ["small"]


def test_the_number_of_responses_is_bounded() -> None:
    store = ResponseStore(max_bytes=1 << 30, max_entries=3)
    for name in ("1", "2", "3", "4"):
        store.put(entry(name))
    assert stored(store, "1", "2", "3", "4") == ["2", "3", "4"]


def test_responses_expire() -> None:
    clock = Clock()
    store = ResponseStore(1 << 30, max_age_s=10, clock=clock)
    store.put(entry("old"))
    clock.now_s = 9.0
    store.put(entry("new", "b"))
    assert stored(store, "old") == ["old"]
    clock.now_s = 10.5
    assert stored(store, "old") == []
    assert stored(store, "new", owner="b") == ["new"]


def test_a_response_that_is_stored_again_counts_once() -> None:
    store = ResponseStore(max_bytes=30_000)
    again = entry("1", num_bytes=10_000)
    for _ in range(5):
        store.put(again)
    store.put(entry("2", num_bytes=10_000))
    assert stored(store, "1", "2") == ["1", "2"]
    assert store.pop("a", "1") is again
    assert store.pop("a", "1") is None
