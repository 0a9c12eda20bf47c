"""The two ASGI responses of generation: a stream of server-sent events, and a whole body.

Both stop their work as soon as the client disconnects. An error before the first event becomes an HTTP status, because
headers are sent with the first event. A later error becomes an event. One task per request watches the client, and
another sends the events of a stream. No task is made per token.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lorafleet.api.access.body_budget import count_answer
from lorafleet.api.answer.anthropic_errors import is_from_anthropics_client
from lorafleet.api.answer.error_responses import SERVER_FAILED, error_event
from lorafleet.api.answer.gathered_writes import body_sender_of
from lorafleet.protocol.errors import LorafleetError

DONE = b"data: [DONE]\n\n"

logger = logging.getLogger("lorafleet.http")


def encode_json(value: object) -> bytes:
    """Encodes as msgspec does, but escapes the characters that some clients interpret as line ends."""
    raw = msgspec.json.encode(value)
    if raw.isascii():
        return raw
    return (
        raw.replace(b"\xc2\x85", b"\\u0085").replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    )


def event(value: object) -> bytes:
    return b"data: " + encode_json(value) + b"\n\n"


class EventStream(Response):
    """A response of server-sent events.

    Args:
        events: Yields the bytes of whole events. The response ends after DONE, or when there are no more events.
        headers: More headers. `events` may add to them before it yields its first bytes.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], headers: dict[str, str] | None = None) -> None:
        super().__init__()
        self._events = events
        self._late_headers = {} if headers is None else headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with while_client_stays(receive):
            # In a task of its own, so that an event does not resume the coroutines of all layers around this one.
            await asyncio.create_task(self._send_events(scope, send))

    async def _send_events(self, scope: Scope, send: Send) -> None:
        async with aclosing(self._events) as events:
            first = await anext(events)
            await send({"type": "http.response.start", "status": 200, "headers": self._raw_headers()})
            send = body_sender_of(scope, send)
            more = not first.endswith(DONE)
            await send({"type": "http.response.body", "body": first, "more_body": more})
            try:
                async for body in events:
                    more = not body.endswith(DONE)
                    await send({"type": "http.response.body", "body": body, "more_body": more})
                if more:
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
            except LorafleetError as error:
                await send({"type": "http.response.body", "body": _last_words(error, scope), "more_body": False})
            except Exception:
                logger.exception("a stream failed")
                broken = LorafleetError(SERVER_FAILED)
                await send({"type": "http.response.body", "body": _last_words(broken, scope), "more_body": False})

    def _raw_headers(self) -> list[tuple[bytes, bytes]]:
        return [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            *((name.encode(), value.encode()) for name, value in self._late_headers.items()),
        ]


class WholeReply(Response):
    """A response that awaits `work` and then sends what it returns."""

    def __init__(self, work: Callable[[], Awaitable[Response]]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with while_client_stays(receive):
            response = await self._work()
            count_answer(scope, len(response.body))
            await response(scope, receive, send)


def json_response(body: object, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), headers=headers, media_type="application/json")


def _last_words(error: LorafleetError, scope: Scope) -> bytes:
    return error_event(error, scope) + (b"" if is_from_anthropics_client(scope) else DONE)


@asynccontextmanager
async def while_client_stays(receive: Receive) -> AsyncIterator[None]:
    """Cancels the block when the client disconnects, and suppresses that cancellation."""
    task = asyncio.current_task()
    assert task is not None
    inside, left = True, False

    def on_leaving(watcher: asyncio.Task[None]) -> None:
        nonlocal left
        failed = watcher.cancelled() or watcher.exception() is not None
        if inside and not failed:
            left = True
            task.cancel()

    watcher = asyncio.create_task(_until_disconnect(receive))
    watcher.add_done_callback(on_leaving)
    try:
        yield
    except asyncio.CancelledError:
        if not left or task.uncancel() > 0:
            raise
    finally:
        inside = False
        watcher.cancel()


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
