"""Publishes batches of KV events by ZeroMQ, in a thread beside the engine's steps.

A message has three frames: the topic, the sequence number (8 bytes, big-endian) and the EventBatch. A subscriber that
misses a number may ask the other socket for all batches from a number on. The answer has the same frames for each
batch that is still there, and ends with the number -1 and no batch.

Source: vllm/distributed/kv_events.py of vLLM.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque

import msgspec
import zmq

from lorafleet.protocol.kv_events_config import KVEventsConfig
from lorafleet.protocol.messages import KVEventStats
from lorafleet.workers.kv_events.event_sockets import EventSockets
from lorafleet.workers.kv_events.wire_events import AllBlocksCleared, EventBatch, KVEvent

MAX_REPLAY_BYTES = 256 << 20  # Of all batches that can be asked for; the oldest are dropped.
POLL_S = 0.1  # Longest time that a request for a replay waits while there are no events.
CLOSE_S = 2.0
REPLAYS_AT_ONCE = 8  # Requests that are answered before the next batch is sent.
END = (-1).to_bytes(8, signed=True)

log = logging.getLogger(__name__)


class EventPublisher:
    """The publisher of one replica. Only the engine loop's thread may call its methods.

    Its first batch says that no blocks are known, for subscribers that have followed another replica at its port.
    """

    def __init__(self, config: KVEventsConfig, sockets: EventSockets) -> None:
        self._sockets = sockets
        self._topic = config.topic.encode()
        self._waiting: queue.Queue[tuple[int, EventBatch] | None] = queue.Queue(config.max_queue_size)
        self._next_number = 0
        self._num_dropped = 0
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps if sockets.replay is not None else 0)
        self._sent_bytes = 0
        self._encode = msgspec.msgpack.Encoder().encode
        self.publish([AllBlocksCleared()])
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: list[KVEvent]) -> None:
        """Queues a batch, or drops it if too many wait. Its number is then missing, so that subscribers notice."""
        number, self._next_number = self._next_number, self._next_number + 1
        try:
            self._waiting.put_nowait((number, EventBatch(time.time(), events, self._sockets.offset)))
        except queue.Full:
            self._num_dropped += 1

    def stats(self) -> KVEventStats:
        return KVEventStats(self._sockets.port, self._next_number, self._num_dropped)

    def close(self) -> None:
        """Publishes what waits, if that takes no longer than CLOSE_S, and closes the sockets."""
        try:
            self._waiting.put(None, timeout=CLOSE_S)
        except queue.Full:
            log.warning("KV events could not be published in time")
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            while True:
                self._answer_replays()
                try:
                    waiting = self._waiting.get(timeout=POLL_S)
                except queue.Empty:
                    continue
                if waiting is None:
                    return
                self._send(*waiting)
        except Exception:
            log.exception("the publisher of KV events has failed; all further batches are dropped")
        finally:
            self._sockets.close()

    def _send(self, number: int, batch: EventBatch) -> None:
        payload = self._encode(batch)
        self._sockets.events.send_multipart((self._topic, number.to_bytes(8), payload))
        if not self._sent.maxlen:
            return
        if len(self._sent) == self._sent.maxlen:
            self._sent_bytes -= len(self._sent[0][1])
        self._sent.append((number, payload))
        self._sent_bytes += len(payload)
        while self._sent_bytes > MAX_REPLAY_BYTES and len(self._sent) > 1:
            self._sent_bytes -= len(self._sent.popleft()[1])

    def _answer_replays(self) -> None:
        replay = self._sockets.replay
        for _ in range(REPLAYS_AT_ONCE):
            if replay is None or not replay.poll(0):
                return
            frames = replay.recv_multipart(zmq.NOBLOCK)
            if len(frames) != 3 or len(frames[2]) != 8:
                log.debug("a request for a replay of KV events is not an empty frame and a number of 8 bytes")
                continue
            first = int.from_bytes(frames[2])
            for number, payload in self._sent:
                if number >= first:
                    replay.send_multipart((frames[0], b"", self._topic, number.to_bytes(8), payload))
            replay.send_multipart((frames[0], b"", b"", END, b""))
