"""The order and the number of the writes of streams, and what a slow or broken client does to them."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from lorafleet.api.answer.gathered_writes import MAX_GATHERED_BYTES, GatheredWrites, StreamSender


class Client:
    """The ASGI side of a client that takes nothing while `ready` is not set. `wire` is the order of all writes."""

    def __init__(self, name: str, wire: list[tuple[str, bytes, bool]]) -> None:
        self.name = name
        self.wire = wire
        self.ready = asyncio.Event()
        self.ready.set()
        self.error: Exception | None = None

    async def send(self, message: Message) -> None:
        if not self.ready.is_set():
            await self.ready.wait()
        if self.error is not None:
            raise self.error
        self.wire.append((self.name, message["body"], message["more_body"]))


def body(data: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


def open_stream(
    name: str, gathered: GatheredWrites, wire: list[tuple[str, bytes, bool]]
) -> tuple[Client, StreamSender]:
    client = Client(name, wire)
    return client, gathered.sender(client.send)


async def test_the_events_of_one_turn_are_one_write_of_each_stream() -> None:
    gathered, wire = GatheredWrites(), []
    (_, a), (_, b) = open_stream("a", gathered, wire), open_stream("b", gathered, wire)
    await a(body(b"1"))
    await b(body(b"2"))
    await a(body(b"3"))
    assert not wire  # The turn is not over.
    await asyncio.sleep(0)
    assert wire == [("a", b"13", True), ("b", b"2", True)]
    await b(body(b"4"))
    await asyncio.sleep(0)
    assert wire[2:] == [("b", b"4", True)]


async def test_the_last_body_takes_along_what_waits_and_is_written_at_once() -> None:
    gathered, wire = GatheredWrites(), []
    _, send = open_stream("a", gathered, wire)
    await send(body(b"1"))
    await send(body(b"2", more=False))
    assert wire == [("a", b"12", False)]
    await asyncio.sleep(0)
    assert len(wire) == 1


async def test_a_slow_client_stops_its_own_stream_alone_and_loses_nothing() -> None:
    gathered, wire = GatheredWrites(), []
    (slow, a), (_, b) = open_stream("a", gathered, wire), open_stream("b", gathered, wire)
    slow.ready.clear()
    await a(body(b"1"))
    await asyncio.sleep(0)
    second = asyncio.create_task(a(body(b"2")))
    await b(body(b"3"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert wire == [("b", b"3", True)]
    assert a.is_stalled
    assert not second.done()  # So the stream reads no further output, and the engine's outputs are joined.
    slow.ready.set()
    await second
    assert not a.is_stalled
    await a(body(b"4", more=False))
    assert wire[1:] == [("a", b"1", True), ("a", b"2", True), ("a", b"4", False)]


async def test_leaving_a_stream_that_waits_for_a_slow_client_ends_its_write() -> None:
    gathered, wire = GatheredWrites(), []
    slow, send = open_stream("a", gathered, wire)
    slow.ready.clear()
    await send(body(b"1"))
    await asyncio.sleep(0)
    second = asyncio.create_task(send(body(b"2")))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    slow.ready.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not wire


async def test_an_error_of_a_delayed_write_is_raised_by_the_next_call_and_hits_no_other_stream() -> None:
    gathered, wire = GatheredWrites(), []
    (broken, a), (_, b) = open_stream("a", gathered, wire), open_stream("b", gathered, wire)
    broken.error = RuntimeError("the connection is broken")
    await a(body(b"1"))
    await b(body(b"2"))
    await asyncio.sleep(0)
    assert wire == [("b", b"2", True)]
    with pytest.raises(RuntimeError, match="is broken"):
        await a(body(b"3"))


async def test_a_stream_with_much_to_send_takes_turns_with_others_and_copies_its_backlog_once() -> None:
    gathered, wire = GatheredWrites(), []
    (_, a), (_, b) = open_stream("a", gathered, wire), open_stream("b", gathered, wire)
    event, num_events = b"x" * (MAX_GATHERED_BYTES // 4), 40

    async def send_backlog() -> None:
        for _ in range(num_events):
            await a(body(event))

    backlog = asyncio.create_task(send_backlog())
    await asyncio.sleep(0)
    await b(body(b"1"))
    await backlog
    writes = [len(data) for name, data, _ in wire if name == "a"]
    assert sum(writes) == num_events * len(event)
    assert max(writes) == MAX_GATHERED_BYTES
    assert wire[0][0] == "a"
    assert wire[1] == ("b", b"1", True)  # Not after the whole backlog.
