"""Gathers the events of all streams that one turn of the event loop makes, and writes them one right after another.

A write to an idle reader wakes its process, which costs the kernel several times as much as the copy. If writes follow
one another closely, the reader is still awake for most of them. Events of one stream that wait together become one
write, up to a bound, after which the stream waits for the next turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from functools import partial
from types import coroutine
from typing import Any

from starlette.types import Message, Scope, Send

from lorafleet.protocol.transport.unread_outputs import IsStalled, never_stalled

_BODY_SENDER = "lorafleet.body_sender"  # Key in the ASGI scope.

MAX_GATHERED_BYTES = 64 << 10  # Bytes of one stream that one turn of the event loop gathers, before its last body.


class GatheredWrites:
    """The streams of one event loop that have something to write in its next turn."""

    def __init__(self) -> None:
        self._waiting: list[StreamSender] = []

    def sender(self, send: Send) -> StreamSender:
        """Returns an ASGI `send` for the bodies of one stream."""
        return StreamSender(send, self)

    def add(self, sender: StreamSender) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._write)
        self._waiting.append(sender)

    def _write(self) -> None:
        waiting, self._waiting = self._waiting, []
        for sender in waiting:
            sender.write()


class StreamSender:
    """Sends the bodies of one stream: all but the last one in the next turn of the event loop.

    A caller waits while the client is too slow to take the previous body, and for the next turn if this one has
    gathered enough. So at most MAX_GATHERED_BYTES and one body are buffered here, and they are joined once. A stream
    that has much to send lets others have their turns, also if its client has left. An error of a delayed write is
    raised by the next call.
    """

    __slots__ = ("_bodies", "_gathered", "_num_bytes", "_send", "_unfinished")

    def __init__(self, send: Send, gathered: GatheredWrites) -> None:
        self._send = send
        self._gathered = gathered
        self._bodies: list[bytes] = []  # The next turn writes them.
        self._num_bytes = 0  # Bytes of these.
        self._unfinished: asyncio.Future[None] | None = None  # A write that waits for the client, or that failed.

    @property
    def is_stalled(self) -> bool:
        """Whether a body waits for the client."""
        return self._unfinished is not None and not self._unfinished.done()

    async def __call__(self, message: Message) -> None:
        if self._unfinished is not None:
            try:
                await self._unfinished
            finally:
                self._unfinished = None
        body: bytes = message["body"]
        if not message["more_body"]:
            self._bodies.append(body)
            await self._send({**message, "body": self._take()})
        elif body:
            if not self._bodies:
                self._gathered.add(self)
            self._bodies.append(body)
            self._num_bytes += len(body)
            if self._num_bytes >= MAX_GATHERED_BYTES:
                await asyncio.sleep(0)  # The event loop calls write() before it resumes this.

    def write(self) -> None:
        """Writes the bodies that wait. It takes no task unless the client is slow."""
        body = self._take()
        if not body:
            return  # The last body took it along.
        writing = self._send({"type": "http.response.body", "body": body, "more_body": True}).__await__()
        loop = asyncio.get_running_loop()
        try:
            awaited = next(writing)
        except StopIteration:
            return
        except Exception as error:
            self._unfinished = loop.create_future()
            self._unfinished.set_exception(error)
            return
        self._unfinished = loop.create_task(_rest(writing, awaited))

    def _take(self) -> bytes:
        bodies, self._bodies, self._num_bytes = self._bodies, [], 0
        return bodies[0] if len(bodies) == 1 else b"".join(bodies)


@coroutine
def _rest(begun: Generator[Any, Any, None], awaited: Any) -> Generator[Any, Any, None]:
    """Runs a coroutine that has begun, and that waits for `awaited`, to its end."""
    while True:
        try:
            yield awaited
        except BaseException as error:
            step = partial(begun.throw, error)
        else:
            step = partial(next, begun)
        try:
            awaited = step()
        except StopIteration:
            return


def set_body_sender(scope: Scope, sender: Send) -> None:
    """Makes streams send their events by `sender`, past the layers around the route, which look at the start alone."""
    scope[_BODY_SENDER] = sender


def body_sender_of(scope: Scope, send: Send) -> Send:
    """Returns the sender that was set, or `send`."""
    sender: Send = scope.get(_BODY_SENDER, send)
    return sender


def is_stalled_of(scope: Scope) -> IsStalled:
    """Returns a function that says whether the request's stream waits for its client."""
    sender = scope.get(_BODY_SENDER)
    return (lambda: sender.is_stalled) if isinstance(sender, StreamSender) else never_stalled
