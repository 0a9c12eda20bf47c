"""Sends what a replica asks of its worker in batches, of which at most one is unacknowledged.

Requests, aborts and calls that arrive meanwhile are gathered, and travel together in the next batch. The worker
acknowledges once per step, so there is at most one message per step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec

from lorafleet.protocol.messages import ClientBatch, Sealed

log = logging.getLogger(__name__)


class BatchSender:
    """Gathers and sends batches in the event loop.

    Args:
        send: Queues a message for the worker without waiting.
        fail: Ends the connection for the reason that it is given. It calls stop().
        unacknowledged_s: The longest time that a worker that sends other messages may leave a batch unacknowledged.
    """

    def __init__(self, send: Callable[[bytes], object], fail: Callable[[str], None], unacknowledged_s: float) -> None:
        self.num_sent = 0  # Number of batches sent, which is also the sequence number of the last one.
        self._send_message = send
        self._fail = fail
        self._limit_s = unacknowledged_s
        self._encoder = msgspec.msgpack.Encoder()
        self._gathering = ClientBatch(0)
        self._unsent: dict[str, Sealed[str]] = {}  # Requests of the batch in preparation, by ID, in order.
        self._is_unacknowledged = False
        self._is_flush_planned = False
        self._is_stopped = False
        self._sent_s = 0.0  # Monotonic time of the last batch.
        self._num_late = 0  # Messages sent long after the last batch that do not acknowledge it.

    def add_request(self, request: Sealed[str]) -> None:
        self._unsent[request.id] = request
        self._plan_flush()

    def add_call(self, call: Sealed[int]) -> None:
        self._gathering.adapter_calls.append(call)
        self._plan_flush()

    def abort(self, request_id: str) -> None:
        """Tells the worker to abort a request, or leaves the request out of its batch if it was not sent yet."""
        if self._unsent.pop(request_id, None) is None and not self._is_stopped:
            self._gathering.aborts.append(request_id)
            self._plan_flush()

    def acknowledge(self, sequence: int) -> None:
        """Sends the next batch if the worker has read the last one, whose number is `sequence`."""
        if sequence == self.num_sent:
            self._is_unacknowledged = False
            self._flush()

    def check_acknowledged(self, sent_s: float) -> None:
        """Fails if the worker does not acknowledge the last batch in time. It has sent a message at `sent_s`.

        The worker reads all arrived messages before each step. So the second message that it sends long after a batch
        was sent must acknowledge that batch; the first may end a step that began before.
        """
        self._num_late += self._is_unacknowledged and sent_s - self._sent_s > self._limit_s
        if self._num_late >= 2:
            self._fail(f"the worker has not read a message that was sent {sent_s - self._sent_s:.0f} s ago")

    def stop(self) -> None:
        """Sends nothing any more."""
        self._is_stopped = True

    def _plan_flush(self) -> None:
        """Schedules a flush at the end of the current loop iteration, so that requests that arrive together travel
        together."""
        if not self._is_unacknowledged and not self._is_flush_planned:
            self._is_flush_planned = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_planned = False
        batch = self._gathering
        if self._is_stopped or not (self._unsent or batch.aborts or batch.adapter_calls):
            return
        try:
            self._send(batch)
        except Exception as error:
            log.exception("a batch cannot be sent to the worker")
            self._fail(f"a batch cannot be sent to the worker: {error!r}")

    def _send(self, batch: ClientBatch) -> None:
        batch.sequence = self.num_sent + 1
        batch.requests = list(self._unsent.values())
        self._send_message(self._encoder.encode(batch))
        self.num_sent += 1
        self._gathering, self._unsent = ClientBatch(0), {}
        self._is_unacknowledged, self._sent_s, self._num_late = True, time.monotonic(), 0
