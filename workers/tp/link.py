"""Carries orders from rank 0 to the other ranks, and their answers back.

It uses zmq over Unix sockets, since the ranks of a replica share a machine. There is one queue to each rank, so that
orders arrive in the order in which they were sent. A queue back is read by a thread that wakes the engine loop. A
message of 4 KB to two ranks takes about 60 us this way, a Ray call a millisecond.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable

import msgspec
import zmq

from lorafleet.protocol.errors import EngineDead
from lorafleet.protocol.transport.addresses import RankAddresses
from lorafleet.workers.tp.rank_messages import (
    Answer,
    BlocksMoved,
    MemoryMoved,
    Order,
    RankFailed,
    ShardLoaded,
    Stop,
    TierContent,
)

log = logging.getLogger(__name__)

POLL_MS = 200  # how soon the receiving thread notices that it must end
GONE_MS = 2000  # a rank that is still connecting needs only a few ms


class OtherRanks:
    """Rank 0's end of the link. Everything but the receiving thread's part belongs to the engine loop's thread."""

    def __init__(self, addresses: RankAddresses, wake: Callable[[], None]) -> None:
        self.ranks = list(range(1, addresses.size))
        self._wake = wake
        self._context = zmq.Context()
        self._queues = [self._bound(zmq.PUSH, addresses.orders(rank)) for rank in self.ranks]
        self._answers = self._bound(zmq.PULL, addresses.answers)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
        self._loaded: deque[ShardLoaded] = deque()
        self._moved: dict[TierContent, deque[BlocksMoved]] = {"blocks": deque(), "states": deque()}
        self._memory_moved: deque[MemoryMoved] = deque()
        self._failed: RankFailed | None = None
        self._closing = threading.Event()
        self._receiver = threading.Thread(target=self._receive, name="tp-answers", daemon=True)
        self._receiver.start()

    def send(self, order: Order) -> None:
        """Sends an order to all other ranks. Raises EngineDead if a rank is gone."""
        encoded = self._encoder.encode(order)
        for rank, queue in zip(self.ranks, self._queues, strict=True):
            if not queue.poll(GONE_MS, zmq.POLLOUT):
                raise EngineDead(f"rank {rank} of the replica has stopped receiving orders.")
            queue.send(encoded)

    def check(self) -> None:
        """Raises EngineDead if a rank has reported that it ends."""
        if self._failed is not None:
            raise EngineDead(f"rank {self._failed.rank} of the replica has ended: {self._failed.reason}")

    def loaded(self) -> list[ShardLoaded]:
        """Returns the answers since the last call. Raises EngineDead as check() does."""
        self.check()
        return [self._loaded.popleft() for _ in range(len(self._loaded))]

    def moved(self, content: TierContent) -> list[BlocksMoved]:
        """Returns the answers about a content of the KV tiers since its last call. Raises EngineDead as check()."""
        self.check()
        moved = self._moved[content]
        return [moved.popleft() for _ in range(len(moved))]

    def memory_moved(self) -> list[MemoryMoved]:
        """Returns the answers to MemoryOrders since the last call. Raises EngineDead as check() does."""
        self.check()
        return [self._memory_moved.popleft() for _ in range(len(self._memory_moved))]

    def close(self) -> None:
        """Orders the ranks that are still there to stop, and closes the link."""
        self._closing.set()
        self._receiver.join()
        for queue in self._queues:
            with contextlib.suppress(zmq.Again):
                queue.send(self._encoder.encode(Stop()), zmq.NOBLOCK)
            queue.close(linger=1000)  # ms: the order to stop must arrive
        self._context.term()

    def _bound(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.bind(address)
        return socket

    def _receive(self) -> None:
        while not self._closing.is_set():
            if not self._answers.poll(POLL_MS):
                continue
            answer = self._decoder.decode(self._answers.recv())
            if isinstance(answer, RankFailed):
                log.error("rank %d has ended: %s", answer.rank, answer.reason)
                self._failed = answer
            elif isinstance(answer, BlocksMoved):
                self._moved[answer.content].append(answer)
            elif isinstance(answer, MemoryMoved):
                self._memory_moved.append(answer)
            else:
                self._loaded.append(answer)
            self._wake()
        self._answers.close(linger=0)


class RankSocket:
    """Another rank's end of the link. receive() belongs to the thread of its loop, and answer() to any thread."""

    def __init__(self, addresses: RankAddresses, rank: int) -> None:
        self._context = zmq.Context()
        self._orders = self._context.socket(zmq.PULL)
        self._orders.set_hwm(0)
        self._orders.connect(addresses.orders(rank))
        self._answers = self._context.socket(zmq.PUSH)
        self._answers.set_hwm(0)
        self._answers.connect(addresses.answers)
        self._answering = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)

    def receive(self, wait_ms: int) -> Order | None:
        """Returns the next order, or None if none arrives within wait_ms."""
        return self._decoder.decode(self._orders.recv()) if self._orders.poll(wait_ms) else None

    def answer(self, answer: Answer) -> None:
        with self._answering:
            self._answers.send(self._encoder.encode(answer))

    def close(self) -> None:
        self._orders.close(linger=0)
        with self._answering:
            self._answers.close(linger=1000)  # ms: the reason why a rank ends must arrive
        self._context.term()
