"""Sends the lines of a batch to a server, and sends them again while the server is too busy or away."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import httpx
import msgspec

from lorafleet.offline.batch.batch_answers import LineAnswer
from lorafleet.offline.batch.batch_input import BatchLine
from lorafleet.offline.batch.request_window import RequestWindow
from lorafleet.protocol.errors import LorafleetError
from lorafleet.protocol.limits import MAX_REQUEST_ID_CHARS, cut

BUSY = {429, 502, 503, 504}  # The statuses after which a line is sent again.
UNAUTHORIZED = 401
MAX_ANSWER_BYTES = 64 << 20
MAX_RETRY_AFTER_S = 300.0
MAX_BACKOFF_S = 30.0
CONNECT_S = 30.0


@dataclass(frozen=True, slots=True)
class SenderOptions:
    """The options of a LineSender."""

    url: str  # The server's address, with or without /v1.
    api_key: str | None = None
    concurrency: int = 256  # Largest number of requests at a time.
    retry_s: float = 600.0  # Time from a line's first attempt to its last.
    timeout_s: float = 3600.0  # Time that the server may take for one answer.
    max_answer_bytes: int = MAX_ANSWER_BYTES


class _Named(msgspec.Struct):
    """The part of an answer that this module reads."""

    id: str = ""


class LineSender:
    """Sends lines to one server.

    Args:
        check: Called after a request without a response. It raises if there will never be one.
        transport: A transport of httpx, for tests.
    """

    def __init__(
        self,
        options: SenderOptions,
        check: Callable[[], None] = lambda: None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._options = options
        self._check = check
        self._sleep = sleep
        self._window = RequestWindow(options.concurrency)
        self._last_response_s = time.monotonic()
        self._client = httpx.AsyncClient(
            base_url=options.url.rstrip("/").removesuffix("/v1"),
            headers={"authorization": f"Bearer {options.api_key}"} if options.api_key else {},
            limits=httpx.Limits(max_connections=options.concurrency),
            timeout=httpx.Timeout(options.timeout_s, connect=CONNECT_S),
            trust_env=False,
            transport=transport,
        )

    async def answer(self, line: BatchLine) -> LineAnswer:
        """Returns the line's answer. Raises LorafleetError if the server refuses the key or no longer answers anything,
        since all other lines would fail too."""
        if line.fault is not None:
            return LineAnswer(line, error=("invalid_line", line.fault))
        until_s = time.monotonic() + self._options.retry_s
        attempt = 0
        while True:
            response, content, fault = await self._attempt(line)
            wait_s = _wait_s(None if response is None else response.headers.get("retry-after"), attempt)
            is_last = time.monotonic() + wait_s > until_s
            if response is not None and (response.status_code not in BUSY or is_last):
                return _read(line, response, content, fault)
            if is_last:
                self._check_alive(fault)
                return LineAnswer(line, error=("no_response", fault))
            await self._sleep(wait_s)
            attempt += 1

    async def close(self) -> None:
        await self._client.aclose()

    async def _attempt(self, line: BatchLine) -> tuple[httpx.Response | None, bytes, str]:
        """Returns the response if there is one, its content, and the reason if one of them is missing."""
        number = await self._window.enter()
        refused = True
        try:
            response, content, fault = await self._post(line)
            refused = response.status_code in BUSY
        except httpx.RequestError as error:
            self._check()
            return None, b"", f"{self._client.base_url} did not answer: {cut(repr(error))}"
        finally:
            await self._window.leave(number, refused=refused)
        self._last_response_s = time.monotonic()
        if response.status_code == UNAUTHORIZED:
            raise LorafleetError(
                f"{self._client.base_url} rejects the API key. Give a valid --api-key, and run the same command again."
            )
        return response, content, fault

    async def _post(self, line: BatchLine) -> tuple[httpx.Response, bytes, str]:
        headers = {"content-type": "application/json"}
        content = bytearray()
        async with self._client.stream("POST", line.url, content=line.body, headers=headers) as response:
            async for chunk in response.aiter_bytes():
                content += chunk
                if len(content) > self._options.max_answer_bytes:
                    return response, b"", f"the answer has more than {self._options.max_answer_bytes} bytes"
        return response, bytes(content), ""

    def _check_alive(self, fault: str) -> None:
        """Raises LorafleetError if no line has had a response for long."""
        if time.monotonic() - self._last_response_s >= self._options.retry_s:
            raise LorafleetError(
                f"{fault}. There was no response for {self._options.retry_s:.0f} s. Run the same command again when "
                "the server answers; what was answered is not asked again."
            )


def _read(line: BatchLine, response: httpx.Response, content: bytes, fault: str) -> LineAnswer:
    if fault:
        return LineAnswer(line, error=("answer_too_large", f"{fault}."))
    try:
        # The output has one line for each answer. Nothing is read here, since an answer may be large.
        body = msgspec.json.format(content, indent=-1) if b"\n" in content else content
        msgspec.json.decode(body, type=msgspec.Raw)
    except (ValueError, RecursionError):
        shown = cut(content[:500].decode(errors="replace"))
        return LineAnswer(line, error=("invalid_response", f"HTTP {response.status_code} without JSON: {shown!r}"))
    request_id = response.headers.get("x-request-id") or _id_of(body)
    return LineAnswer(line, response.status_code, request_id[:MAX_REQUEST_ID_CHARS], body)


def _id_of(body: bytes) -> str:
    """Returns the ID of an answer, or "" if it has none."""
    try:
        return msgspec.json.decode(body, type=_Named).id
    except ValueError:
        return ""


def _wait_s(retry_after: str | None, attempt: int) -> float:
    """Returns the server's Retry-After, or else a time that doubles. A random part spreads lines that were refused
    together."""
    try:
        wait_s = min(max(float(retry_after or ""), 0.0), MAX_RETRY_AFTER_S)
    except ValueError:  # There is none, or it is a date.
        wait_s = min(0.5 * 2.0 ** min(attempt, 16), MAX_BACKOFF_S)
    return wait_s * (1.0 + 0.1 * random.random())
