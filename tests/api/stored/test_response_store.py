"""The store of responses keeps what its bounds allow, and drops the rest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import pytest

from lorafleet.api.stored.background_run import PAGE_BYTES, BackgroundRun
from lorafleet.api.stored.response_query import ResponseQuery
from lorafleet.api.stored.response_store import ResponseStore, StoredResponse
from lorafleet.api.stored.stored_responses import StoredResponses
from lorafleet.protocol.errors import QueueFull


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


@dataclass
class GrowingAnswer:
    """An answer of `steps` steps, each with an event of `event_bytes`, whose items keep `kept_bytes` of it."""

    steps: int
    event_bytes: int
    kept_bytes: int = 0
    num_bytes: int = 0
    go: asyncio.Event = field(default_factory=asyncio.Event)
    failure: QueueFull | None = None

    async def run(self) -> AsyncGenerator[bytes, None]:
        await self.go.wait()
        for step in range(self.steps):
            self.num_bytes += self.kept_bytes
            yield str(step).zfill(self.event_bytes - 2).encode() + b"\n\n"

    def end_early(self, status: str, failure: QueueFull | None = None) -> bytes:
        self.failure = failure
        return status.encode() + b"\n\n"

    def encoded(self) -> bytes:
        return b"{}"


async def run_to_end(store: ResponseStore, *answers: GrowingAnswer) -> list[StoredResponse]:
    """Generates the answers of one owner one after another, and returns their entries, which are all running."""
    entries: list[StoredResponse] = []
    for i, answer in enumerate(answers):
        running = StoredResponse(f"run {i}", "a", b"", b"", streams=True)
        running.run = BackgroundRun(answer, lambda running=running: store.fits(running), lambda: None, records=True)
        store.put(running)
        entries.append(running)
    for answer, running in zip(answers, entries, strict=True):
        answer.go.set()
        assert running.run is not None
        await running.run.ended()
    return entries


async def test_the_events_of_a_response_that_runs_count_and_the_oldest_are_dropped() -> None:
    store = ResponseStore(max_bytes=100_000)
    store.put(entry("finished", num_bytes=30_000))
    store.put(entry("theirs", "b", 30_000))
    [running] = await run_to_end(store, GrowingAnswer(steps=1000, event_bytes=100))
    assert running.run is not None
    assert running.run.num_event_bytes <= 50_000
    assert 500 < running.run.num_dropped < 1000
    assert stored(store, "finished") == []  # It made room first.
    assert stored(store, "theirs", owner="b") == ["theirs"]
    found = await StoredResponses(store).find_here(ResponseQuery("a", "run 0", "events", 0))
    assert found is not None
    assert (found.events, found.num_dropped) == ([], running.run.num_dropped)
    found = await StoredResponses(store).find_here(ResponseQuery("a", "run 0", "events", found.num_dropped - 1))
    assert found is not None
    assert int(found.events[0]) == found.num_dropped
    assert int(found.events[-1]) == 999


async def test_responses_that_do_not_fit_even_without_their_events_fail_and_say_why() -> None:
    store = ResponseStore(max_bytes=200_000)
    small = GrowingAnswer(steps=10, event_bytes=100, kept_bytes=100)
    large = GrowingAnswer(steps=1000, event_bytes=100, kept_bytes=200)
    [_, running] = await run_to_end(store, small, large)
    assert small.failure is None
    assert large.failure is not None
    assert "response-store-bytes" in large.failure.message
    assert running.run is not None
    assert large.num_bytes <= 100_000


async def test_events_are_read_in_pages() -> None:
    store = ResponseStore(max_bytes=100 * PAGE_BYTES)
    [running] = await run_to_end(store, GrowingAnswer(steps=30, event_bytes=PAGE_BYTES // 10))
    assert running.run is not None
    page = await running.run.wait_for_events(4, 0)
    assert [int(event[-10:]) for event in page] == list(range(5, 16))


@pytest.mark.parametrize("owner", ["a", "b"])
def test_an_id_that_a_client_has_chosen_belongs_to_one_response_of_its_owner(owner: str) -> None:
    responses = StoredResponses(ResponseStore(max_bytes=10_000))
    end = responses.claim("a", "r")
    assert end is not None
    assert (responses.claim(owner, "r") is None) == (owner == "a")
    end()
    end = responses.claim("a", "r")
    assert end is not None
    responses.store.put(entry("r"))
    end()
    assert responses.claim("a", "r") is None
