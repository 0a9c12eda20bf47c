"""Batches to the worker: one at a time, acknowledged in time, and without what was aborted before it was sent."""

from __future__ import annotations

import asyncio
import time

import msgspec

from lorafleet.protocol.messages import ClientBatch, Sealed
from lorafleet.protocol.transport.batch_sender import BatchSender

LIMIT_S = 10.0


class Wire:
    """The connection below a sender."""

    def __init__(self) -> None:
        self.batches: list[ClientBatch] = []
        self.failures: list[str] = []
        self.sender = BatchSender(self.send, self.failures.append, LIMIT_S)

    def send(self, message: bytes) -> None:
        self.batches.append(msgspec.msgpack.decode(message, type=ClientBatch))

    @property
    def sent_ids(self) -> list[list[str]]:
        return [[request.id for request in batch.requests] for batch in self.batches]


def request(request_id: str) -> Sealed[str]:
    return Sealed(request_id, msgspec.Raw(b"\x90"))


async def test_requests_that_come_together_travel_together_and_later_ones_wait_for_the_acknowledgment() -> None:
    wire = Wire()
    wire.sender.add_request(request("a"))
    wire.sender.add_request(request("b"))
    assert wire.batches == []
    await asyncio.sleep(0)
    wire.sender.add_request(request("c"))
    await asyncio.sleep(0)
    assert wire.sent_ids == [["a", "b"]]
    wire.sender.acknowledge(0)
    assert len(wire.batches) == 1
    wire.sender.acknowledge(1)
    assert wire.sent_ids == [["a", "b"], ["c"]]
    assert [batch.sequence for batch in wire.batches] == [1, 2] and wire.sender.num_sent == 2


async def test_a_request_that_is_aborted_before_it_is_sent_is_never_sent() -> None:
    wire = Wire()
    wire.sender.add_request(request("a"))
    wire.sender.abort("a")
    await asyncio.sleep(0)
    assert wire.batches == []
    wire.sender.add_request(request("b"))
    await asyncio.sleep(0)
    wire.sender.abort("b")
    wire.sender.acknowledge(1)
    assert [batch.aborts for batch in wire.batches] == [[], ["b"]]


async def test_the_second_late_message_without_an_acknowledgment_ends_the_connection() -> None:
    wire = Wire()
    wire.sender.add_request(request("a"))
    await asyncio.sleep(0)
    late_s = time.monotonic() + LIMIT_S + 1
    wire.sender.check_acknowledged(late_s)
    assert wire.failures == []
    wire.sender.check_acknowledged(late_s)
    assert wire.failures == ["the worker has not read a message that was sent 11 s ago"]


async def test_a_stopped_sender_sends_nothing() -> None:
    wire = Wire()
    wire.sender.add_request(request("a"))
    wire.sender.stop()
    wire.sender.abort("b")
    await asyncio.sleep(0)
    assert wire.batches == []
