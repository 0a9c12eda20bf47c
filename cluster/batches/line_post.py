"""Declares how the replica that runs a batch has its lines answered by any replica, and answers them there.

A line passes through the whole API of a replica, like a client's request: its tenant's limits, metering and adapters
apply. It has no API key, since the server stores none; the caller is set within the process instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace

import httpx
import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from lorafleet.api.access.caller import set_inner_caller
from lorafleet.cluster.batches.batch_records import BatchCaller, FindCaller

_PASSED_ON = ("retry-after", "x-request-id")


class LinePost(msgspec.Struct, frozen=True):
    """One line of a batch, as a request."""

    path: str
    body: bytes
    caller: BatchCaller


class LineReply(msgspec.Struct, frozen=True):
    status: int
    headers: dict[str, str]
    content: bytes


PostLine = Callable[[LinePost], Awaitable[LineReply]]
UNKNOWN_KEY = LineReply(503, {}, b'{"error": {"message": "This replica does not know the API key of the batch."}}')


@dataclass(frozen=True, slots=True)
class LineAnswerer:
    """Answers lines in the process of a replica. `find_caller` finds who sends them."""

    app: ASGIApp
    find_caller: FindCaller

    async def answer(self, post: LinePost) -> LineReply:
        caller = self.find_caller(post.caller)
        if caller is None:  # The replica that runs the batch reads the keys, too, and will end the batch.
            return UNKNOWN_KEY
        caller = replace(caller, is_batch=True)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            set_inner_caller(scope, caller)
            await self.app(scope, receive, send)

        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://localhost", timeout=None
        ) as client:
            headers = {"content-type": "application/json"}
            response = await client.post(post.path, content=post.body, headers=headers)
        passed_on = {name: response.headers[name] for name in _PASSED_ON if name in response.headers}
        return LineReply(response.status_code, passed_on, response.content)


class LineTransport(httpx.AsyncBaseTransport):
    """Lets a LineSender, which runs in a thread and a loop of its own, post its lines from the replica's loop.

    Args:
        places: Bounds the lines of all batches that are in flight. It belongs to `loop`.
        timeout_s: Seconds after which a line without an answer is sent again.
    """

    def __init__(
        self,
        post: PostLine,
        caller: BatchCaller,
        loop: asyncio.AbstractEventLoop,
        places: AbstractAsyncContextManager[None],
        timeout_s: float,
    ) -> None:
        self._post = post
        self._caller = caller
        self._loop = loop
        self._places = places
        self._timeout_s = timeout_s

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        post = LinePost(request.url.path, await request.aread(), self._caller)
        posting = self._post_in_turn(post)
        try:
            future: Future[LineReply] = asyncio.run_coroutine_threadsafe(posting, self._loop)
        except RuntimeError:  # The loop is closed, since the replica ends.
            posting.close()
            raise httpx.ConnectError("the replica ends", request=request) from None
        try:
            reply = await asyncio.wrap_future(future)
        except Exception as error:  # Any failure of a replica or of Ray: the line is sent again.
            raise httpx.ConnectError(repr(error), request=request) from error
        return httpx.Response(reply.status, headers=reply.headers, content=reply.content, request=request)

    async def _post_in_turn(self, post: LinePost) -> LineReply:
        async with self._places, asyncio.timeout(self._timeout_s):
            return await self._post(post)
