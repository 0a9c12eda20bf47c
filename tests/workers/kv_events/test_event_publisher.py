"""Sequence numbers, dropped batches, replays and ports of the publisher, with a real subscriber."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import zmq

from lorafleet.protocol.errors import ConfigError
from lorafleet.protocol.kv_events_config import KVEventsConfig
from lorafleet.workers.kv_events import wire_events as wire
from lorafleet.workers.kv_events.event_publisher import EventPublisher
from lorafleet.workers.kv_events.event_sockets import EventSockets
from tests.workers.kv_events.ports import free_ports
from tests.workers.kv_events.subscriber import AllBlocksCleared, BlockRemoved, Subscriber

Start = Callable[..., tuple[EventPublisher, Subscriber]]


def config(port: int, **fields: Any) -> KVEventsConfig:
    return KVEventsConfig(
        enable_kv_cache_events=True,
        endpoint=f"tcp://127.0.0.1:{port}",
        replay_endpoint=f"tcp://127.0.0.1:{port + 10}",
        **fields,
    )


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as stack:

        def started(**fields: Any) -> tuple[EventPublisher, Subscriber]:
            port = free_ports(11)
            events = config(port, **fields)
            publisher = EventPublisher(events, EventSockets.bind(events, 1))
            stack.callback(publisher.close)
            subscriber = Subscriber(port, replay_port=port + 10)
            stack.callback(subscriber.close)
            return publisher, subscriber

        yield started


def removal(number: int) -> list[wire.KVEvent]:
    return [wire.BlockRemoved([number], wire.MEDIUM)]


def all_sent(publisher: EventPublisher, subscriber: Subscriber, first: int = 0) -> list[int]:
    """The numbers that a replay has, when the last batch has been sent. It must not be a dropped one."""
    last = publisher.stats().batches - 1
    while True:
        numbers = [number for _, number, _ in subscriber.replay(first)]
        if numbers and numbers[-1] == last:
            return numbers


def test_a_subscriber_that_has_missed_batches_asks_for_them(start: Start) -> None:
    publisher, subscriber = start(topic="kv@pod@model")
    for number in range(1, 6):
        publisher.publish(removal(number))
    assert all_sent(publisher, subscriber) == [0, 1, 2, 3, 4, 5]
    replayed = subscriber.replay(3)
    assert [(topic, number) for topic, number, _ in replayed] == [(b"kv@pod@model", number) for number in (3, 4, 5)]
    assert [batch.events for _, _, batch in replayed] == [[BlockRemoved([number], "GPU")] for number in (3, 4, 5)]
    assert subscriber.replay(0)[0][2].events == [AllBlocksCleared()]
    assert subscriber.replay(6) == []


def test_only_the_last_batches_can_be_asked_for(start: Start) -> None:
    publisher, subscriber = start(buffer_steps=3)
    for number in range(1, 10):
        publisher.publish(removal(number))
    assert all_sent(publisher, subscriber) == [7, 8, 9]


def test_dropped_batches_are_counted_and_their_numbers_are_missing(start: Start) -> None:
    publisher, subscriber = start(max_queue_size=1)
    while not publisher.stats().dropped:
        publisher.publish(removal(0))
    dropped = 0
    while publisher.stats().dropped > dropped:  # Until the last one is not dropped.
        dropped = publisher.stats().dropped
        publisher.publish(removal(1))
    stats = publisher.stats()
    assert len(all_sent(publisher, subscriber)) == stats.batches - stats.dropped


def test_a_malformed_request_is_ignored(start: Start) -> None:
    publisher, subscriber = start()
    context: zmq.Context = zmq.Context()
    sockets = []
    for frames in ((b"",), (b"", b"123"), (b"", b"", b"", b""), (b"x" * 100_000,)):
        sockets.append(socket := context.socket(zmq.DEALER))
        socket.connect(f"tcp://127.0.0.1:{subscriber.replay_port}")
        socket.send_multipart(frames)
    assert all_sent(publisher, subscriber) == [0]
    context.destroy(linger=0)


def test_each_replica_of_a_machine_takes_the_next_ports() -> None:
    port = free_ports(13)
    with ExitStack() as stack:
        for offset in range(3):
            sockets = EventSockets.bind(config(port), 3)
            stack.callback(sockets.close)
            assert (sockets.offset, sockets.port) == (offset, port + offset)
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{port} and .*:{port + 10}, .* in use; 3 were tried"):
            EventSockets.bind(config(port), 3, patience_s=0.0)
