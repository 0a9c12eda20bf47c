"""Administration of a running server from Python: AdminClient, and AsyncAdminClient for asyncio.

    with AdminClient("http://127.0.0.1:8000", key) as client:
        client.push("sql", "./trained/sql", replicas=2)

It needs neither Ray nor torch. docs/adapters.md describes each call.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, TypeVar, Unpack

import httpx
import msgspec

from lorafleet.client import calls
from lorafleet.client.calls import AdminCall, PushOptions
from lorafleet.client.client_errors import APIConnectionError, APIError, status_error
from lorafleet.client.packing import pack
from lorafleet.client.results import Adapter, AdapterPage, Prefetched, Quality, QualityList, Removed, Verified

URL_VARIABLE = "LORAFLEET_URL"
KEY_VARIABLE = "LORAFLEET_ADMIN_KEY"
DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 600.0  # A push waits until replicas have loaded the adapter.
REMOVE_S = 60.0  # Time that `remove` waits for requests in flight.
PAGE = 100
CHUNK_BYTES = 1 << 20

AnswerT = TypeVar("AnswerT")


class AdminClient:
    """A client for the administration of a server.

    Every call raises APIStatusError with the server's message, or APIConnectionError.

    Args:
        url: Defaults to LORAFLEET_URL.
        key: Defaults to LORAFLEET_ADMIN_KEY.
        transport: A transport of httpx, for proxies or certificates.
    """

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._http = httpx.Client(**_settings(url, key, timeout_s), transport=transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def list(self, after: str = "") -> Iterator[Adapter]:
        """Yields all adapters after `after` in the order of their names; requests the next page when it is needed."""
        while True:
            page = self.page(after, PAGE)
            yield from page.data
            if not page.has_more or page.last_id is None:
                return
            after = page.last_id

    def page(self, after: str = "", limit: int = PAGE) -> AdapterPage:
        return self._send(calls.page(after, limit))

    def show(self, name: str) -> Adapter:
        return self._send(calls.show(name))

    def push(self, name: str, folder: str | os.PathLike[str], **options: Unpack[PushOptions]) -> Adapter:
        """Uploads a new adapter, or a new version of an adapter, from a folder of this machine."""
        return self._send(calls.upload(name, Path(folder), options))

    def push_from(self, name: str, source: str, **options: Unpack[PushOptions]) -> Adapter:
        """Adds a new adapter, or a new version of an adapter, from a path or URI that the server reads."""
        return self._send(calls.push(name, source, options))

    def alias(self, name: str, to: int | Mapping[int, float], alias: str | None = None) -> Adapter:
        """Points an alias to a version, or to several versions with weights. `alias` defaults to the adapter's own
        name."""
        return self._send(calls.alias(name, to, alias))

    def unalias(self, name: str, alias: str) -> Adapter:
        return self._send(calls.unalias(name, alias))

    def rollback(self, name: str, alias: str | None = None) -> Adapter:
        return self._send(calls.rollback(name, alias))

    def pin(self, name: str, replicas: int = 1) -> Adapter:
        return self._send(calls.pin(name, replicas))

    def unpin(self, name: str) -> Adapter:
        return self._send(calls.unpin(name))

    def prefetch(self, name: str, replicas: int = 1) -> Prefetched:
        return self._send(calls.prefetch(name, replicas))

    def verify(self, name: str) -> Verified:
        return self._send(calls.verify(name))

    def remove(self, name: str, wait_s: float = REMOVE_S) -> Removed:
        return self._send(calls.remove(name, wait_s))

    def quality(self) -> QualityList:
        """Returns the last run of every set of quality probes."""
        return self._send(calls.quality())

    def run_quality(self, model: str) -> Quality:
        """Runs a model's quality probes now."""
        return self._send(calls.run_quality(model, accept=False))

    def accept_quality(self, model: str) -> Quality:
        """Runs a model's quality probes now and makes the result the new baseline."""
        return self._send(calls.run_quality(model, accept=True))

    def _send(self, call: AdminCall[AnswerT]) -> AnswerT:
        if call.folder is None:
            return self._sent(call, _json(call))
        with tempfile.TemporaryFile() as packed:
            return self._sent(call, {"content": packed, "headers": _tar(pack(call.folder, packed))})

    def _sent(self, call: AdminCall[AnswerT], body: dict[str, Any]) -> AnswerT:
        try:
            response = self._http.request(call.method, _path(call), params=call.query, **body)
        except httpx.TransportError as error:
            raise _unreached(self._http.base_url, error) from error
        return _answer(call, response)


class AsyncAdminClient:
    """The asyncio version of AdminClient."""

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._http = httpx.AsyncClient(**_settings(url, key, timeout_s), transport=transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def list(self, after: str = "") -> AsyncIterator[Adapter]:
        while True:
            page = await self.page(after, PAGE)
            for adapter in page.data:
                yield adapter
            if not page.has_more or page.last_id is None:
                return
            after = page.last_id

    async def page(self, after: str = "", limit: int = PAGE) -> AdapterPage:
        return await self._send(calls.page(after, limit))

    async def show(self, name: str) -> Adapter:
        return await self._send(calls.show(name))

    async def push(self, name: str, folder: str | os.PathLike[str], **options: Unpack[PushOptions]) -> Adapter:
        return await self._send(calls.upload(name, Path(folder), options))

    async def push_from(self, name: str, source: str, **options: Unpack[PushOptions]) -> Adapter:
        return await self._send(calls.push(name, source, options))

    async def alias(self, name: str, to: int | Mapping[int, float], alias: str | None = None) -> Adapter:
        return await self._send(calls.alias(name, to, alias))

    async def unalias(self, name: str, alias: str) -> Adapter:
        return await self._send(calls.unalias(name, alias))

    async def rollback(self, name: str, alias: str | None = None) -> Adapter:
        return await self._send(calls.rollback(name, alias))

    async def pin(self, name: str, replicas: int = 1) -> Adapter:
        return await self._send(calls.pin(name, replicas))

    async def unpin(self, name: str) -> Adapter:
        return await self._send(calls.unpin(name))

    async def prefetch(self, name: str, replicas: int = 1) -> Prefetched:
        return await self._send(calls.prefetch(name, replicas))

    async def verify(self, name: str) -> Verified:
        return await self._send(calls.verify(name))

    async def remove(self, name: str, wait_s: float = REMOVE_S) -> Removed:
        return await self._send(calls.remove(name, wait_s))

    async def quality(self) -> QualityList:
        return await self._send(calls.quality())

    async def run_quality(self, model: str) -> Quality:
        return await self._send(calls.run_quality(model, accept=False))

    async def accept_quality(self, model: str) -> Quality:
        return await self._send(calls.run_quality(model, accept=True))

    async def _send(self, call: AdminCall[AnswerT]) -> AnswerT:
        if call.folder is None:
            return await self._sent(call, _json(call))
        with tempfile.TemporaryFile() as packed:
            headers = _tar(await asyncio.to_thread(pack, call.folder, packed))
            return await self._sent(call, {"content": _chunks(packed), "headers": headers})

    async def _sent(self, call: AdminCall[AnswerT], body: dict[str, Any]) -> AnswerT:
        try:
            response = await self._http.request(call.method, _path(call), params=call.query, **body)
        except httpx.TransportError as error:
            raise _unreached(self._http.base_url, error) from error
        return _answer(call, response)


def _settings(url: str | None, key: str | None, timeout_s: float) -> dict[str, Any]:
    url = os.environ.get(URL_VARIABLE) or DEFAULT_URL if url is None else url
    key = os.environ.get(KEY_VARIABLE, "") if key is None else key
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        httpx.URL(url)
    except httpx.InvalidURL as error:
        raise APIError(f"{url!r} is no URL: {error}. Give one such as {DEFAULT_URL}.") from error
    return {"base_url": url, "headers": headers, "timeout": timeout_s}


def _path(call: AdminCall[Any]) -> str:
    return f"/v1/{call.of}/{call.path}" if call.path else f"/v1/{call.of}"


def _json(call: AdminCall[Any]) -> dict[str, Any]:
    """Returns the body as JSON, without values that are None."""
    if call.body is None:
        return {}
    return {"json": {name: value for name, value in call.body.items() if value is not None}}


def _tar(num_bytes: int) -> dict[str, str]:
    return {"content-type": "application/x-tar", "content-length": str(num_bytes)}


async def _chunks(packed: IO[bytes]) -> AsyncIterator[bytes]:
    while chunk := await asyncio.to_thread(packed.read, CHUNK_BYTES):
        yield chunk


def _unreached(url: httpx.URL, error: httpx.TransportError) -> APIConnectionError:
    return APIConnectionError(f"{url} does not answer: {error or type(error).__name__}.")


def _answer(call: AdminCall[AnswerT], response: httpx.Response) -> AnswerT:
    if not response.is_success:
        raise status_error(response)
    try:
        return msgspec.json.decode(response.content, type=call.answer)
    except msgspec.DecodeError as error:
        raise APIConnectionError(f"{response.url} answers what no lorafleet does: {error}.") from error
