"""Receives the body of a push from memory (adapter_formats/tensor_push.py), and checks its tensors' checksums."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from starlette.requests import Request

from lorafleet.api.access.body_budget import BodyBudget, HeldBody
from lorafleet.api.access.caller import caller_of
from lorafleet.api.access.caller_admission import add_admission
from lorafleet.api.access.work_threads import PUSHED_BYTES, in_turn
from lorafleet.api.request.parsing import check_encoding
from lorafleet.cluster.admin.push_intake import PushIntake
from lorafleet.protocol.adapter_formats.announced_tensors import AnnouncedPush
from lorafleet.protocol.adapter_formats.tensor_push import (
    MAX_HEAD_BYTES,
    MAX_PUSH_BYTES,
    PushHead,
    compare_sums,
    part_length,
)
from lorafleet.protocol.errors import BodyTimeout, BodyTooLarge, InvalidRequest
from lorafleet.protocol.outside.header_numbers import header_number

MAX_READ_S = 300.0  # Time from the request's head to the last byte of its body.

OpenIntake = Callable[[bytes, int], AbstractAsyncContextManager[PushIntake]]


def tensor_budget() -> BodyBudget:
    """Returns the limit of a replica: two of the largest bodies at a time, and one of them for each owner."""
    return BodyBudget(2 * MAX_PUSH_BYTES)


@asynccontextmanager
async def received(request: Request, budget: BodyBudget, open_intake: OpenIntake) -> AsyncIterator[PushIntake]:
    """Reads the body and yields its content, which is complete and has the right checksums. Its bytes count in the
    budget until the request ends.

    Args:
        open_intake: Opens an intake for a config and a number of bytes of weights.

    Raises AdapterMalformed, BodyTooLarge, BodyTimeout, QueueFull, Overloaded, StoreError, and InvalidRequest if the
    body's length is not declared or wrong.
    """
    size = _declared_size(request)
    held = HeldBody(budget, caller_of(request))
    add_admission(request.scope, held)
    held.add(size)
    body = _Body(request, size)
    async with body.in_time():
        head_bytes = await body.read_head()
        head = await in_turn(PUSHED_BYTES, PushHead.parse, head_bytes, body.missing_bytes)
    async with open_intake(head.config, len(head.header) + body.missing_bytes) as intake:
        intake.add(head.header)
        async with body.in_time():
            async for part in body.parts():
                intake.add(part)
        compare_sums(await intake.content.sums(), head.sums, "sha256")
        yield intake


async def read_announced(request: Request, from_device: bool) -> AnnouncedPush:
    """Reads the body of a push whose tensors come from elsewhere. Raises AdapterMalformed, BodyTooLarge, BodyTimeout,
    and InvalidRequest if the body's length is not declared or wrong."""
    body = _Body(request, _declared_size(request))
    async with body.in_time():
        head = await body.read_head()
        parsed = await in_turn(PUSHED_BYTES, AnnouncedPush.parse, head, from_device)
        if body.missing_bytes:
            raise InvalidRequest("The body must end with its head, since its tensors come from elsewhere.")
    return parsed


def _declared_size(request: Request) -> int:
    check_encoding(request)
    size = header_number(request.headers.get("content-length", ""))
    if not size:
        raise InvalidRequest("A push of tensors must have a body and its length in the header Content-Length.")
    if size > MAX_PUSH_BYTES:
        raise BodyTooLarge(
            f"The body has {size} bytes; a push from memory may have at most {MAX_PUSH_BYTES}. Upload the adapter's "
            "files instead, with `lorafleet adapters push NAME FOLDER`."
        )
    return size


class _Body:
    """The body of a request while it is read."""

    def __init__(self, request: Request, size: int) -> None:
        self._stream = aiter(request.stream())
        self._deadline_s = asyncio.get_running_loop().time() + MAX_READ_S
        self._size = size
        self._rest = b""  # Bytes behind the head that came with it.
        self.missing_bytes = size  # Bytes behind those that read_head() has returned.

    @asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout_at(self._deadline_s):
                yield
        except TimeoutError:
            raise BodyTimeout(f"The body did not arrive within {MAX_READ_S:g} s; use a faster connection.") from None

    async def read_head(self) -> bytes:
        came = bytearray()
        while (length := part_length(came, MAX_HEAD_BYTES, self._size, "its head")) is None or len(came) < 8 + length:
            part = await anext(self._stream, None)
            if part is None:
                raise _too_short()
            came += part
        self.missing_bytes = self._size - 8 - length
        self._rest = bytes(came[8 + length :])
        return bytes(came[8 : 8 + length])

    async def parts(self) -> AsyncIterator[bytes]:
        """Yields the parts behind the head, which together have as many bytes as were missing."""
        missing = self.missing_bytes
        part: bytes | None = self._rest
        while part is not None:
            if len(part) > missing:
                raise InvalidRequest("The body has more bytes than its Content-Length says.")
            missing -= len(part)
            yield part
            part = await anext(self._stream, None)
        if missing:
            raise _too_short()


def _too_short() -> InvalidRequest:
    return InvalidRequest("The body has fewer bytes than its Content-Length says.")
