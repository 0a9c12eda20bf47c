"""Administration of a running server from Python: AdminClient, and AsyncAdminClient for asyncio.

    with AdminClient("http://127.0.0.1:8000", key) as client:
        client.push("sql", "./trained/sql", replicas=2)

It needs neither Ray nor torch. docs/adapters.md describes each call.
"""

from __future__ import annotations

import asyncio
import functools
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Concatenate, ParamSpec, Self, TypedDict, TypeVar, Unpack, cast

import httpx

from lorafleet.client.client_errors import APIError, status_error
from lorafleet.client.group_verbs import GroupAnswer, JoinWeightsGroup, LeaveWeightsGroup
from lorafleet.client.http_calls import HttpCall, answer_of, call_of, reaching
from lorafleet.client.packing import pack
from lorafleet.client.places import AdapterPlaces, ListPlaces, PlacesPage, ShowPlaces
from lorafleet.client.quality_verbs import AcceptQuality, ListQuality, RunQuality
from lorafleet.client.receiving import AdapterReceiver, DownloadTarget, receiving
from lorafleet.client.results import (
    Adapter,
    AdapterPage,
    Downloaded,
    Prefetched,
    PushedVersion,
    Quality,
    QualityList,
    Removed,
    Verified,
)
from lorafleet.client.shared_memory import shared_tensors
from lorafleet.client.sleep_verbs import ShowSleep, SleepAll, SleepState, SleepStatus, WakeStatus, WakeUpAll
from lorafleet.client.tensor_packing import SharedTensors, pack_shared, pack_tensors
from lorafleet.client.weights_group import WeightsGroup
from lorafleet.protocol import admin_verbs as verbs
from lorafleet.protocol.admin_verbs import REMOVE_S, Verb
from lorafleet.protocol.engine_control import ALL_MEMORY, InFlight, MemoryTag, PauseMode, SleepLevel

URL_VARIABLE = "LORAFLEET_URL"
KEY_VARIABLE = "LORAFLEET_ADMIN_KEY"
DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 600.0  # A push waits until replicas have loaded the adapter.
PAGE = 100
CHUNK_BYTES = 1 << 20
TAR_TYPE = "application/x-tar"
TENSORS_TYPE = "application/octet-stream"

OnTransfer = Callable[[int, int], None]  # Gets the number of bytes sent or received, and of all bytes.

P = ParamSpec("P")
AnswerT = TypeVar("AnswerT")


class PushArguments(TypedDict, total=False):
    """Options for adding an adapter or a version."""

    # Number of replicas that must load the adapter before the call returns; None: all. Default: 1, and all for tensors.
    replicas: int | None
    activate: bool  # Whether the name's requests use this version from now on. Default: True.
    pin: int | None  # Number of replicas that pin the adapter in a slot.
    tenant: str | None  # Tenant that will own the adapter, if the operator pushes it.
    base_model_name: str | None
    metadata: dict[str, str]  # Stored with the version.
    # Treatment of requests that the former version is answering: finish leaves them alone (the default), switch lets
    # them go on with this version from their next token on, and abort ends them.
    in_flight: InFlight


class AdminClient:
    """A client for the administration of a server.

    Every call raises APIStatusError with the server's message, or APIConnectionError.

    Args:
        url: Address of the server. Default: the variable LORAFLEET_URL, or http://127.0.0.1:8000.
        key: The admin key or an API key. Default: the variable LORAFLEET_ADMIN_KEY.
        timeout_s: Seconds without any progress after which a call fails.
        transport: A transport of httpx, for proxies or certificates.
        on_upload: Called while `push` uploads files.
        on_download: Called while `download` receives files.
    """

    def __init__(
        self,
        url: str | None = None,
        key: str | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        transport: httpx.BaseTransport | None = None,
        on_upload: OnTransfer | None = None,
        on_download: OnTransfer | None = None,
    ) -> None:
        self._http = httpx.Client(**_settings(url, key, timeout_s), transport=transport)
        self._on_upload = on_upload
        self._on_download = on_download

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections to the server."""
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
        """Returns at most `limit` adapters after the name `after`, in the order of their names."""
        return self._send(verbs.ListAdapters(after, limit))

    def show(self, name: str) -> Adapter:
        """Returns an adapter with its versions, aliases and pins."""
        return self._send(verbs.ShowAdapter(name))

    def push(self, name: str, folder: str | os.PathLike[str], **options: Unpack[PushArguments]) -> Adapter:
        """Uploads a new adapter, or a new version of an adapter, from a folder of this machine."""
        message = verbs.UploadAdapter(name, str(Path(folder).absolute()), verbs.PushOptions(**options))
        return self._upload(message, Path(folder))

    def push_tensors(
        self,
        name: str,
        tensors: Mapping[str, Any] | bytes,
        config: Mapping[str, Any],
        **options: Unpack[PushArguments],
    ) -> PushedVersion:
        """Pushes a new adapter, or a new version of an adapter, from memory: neither side writes a file on the way.

        By default all replicas have loaded the version when the call returns.

        Args:
            tensors: torch tensors or numpy arrays by PEFT's names, or the content of a safetensors file.
            config: Content of adapter_config.json, as LoraConfig.to_dict() returns it.
        """
        options.setdefault("replicas", None)
        message = verbs.UploadTensors(name, options=verbs.PushOptions(**options))
        return self._upload_tensors(message, tensors, config)

    def push_from_distributed(
        self,
        name: str,
        tensors: Mapping[str, Any],
        config: Mapping[str, Any],
        group: WeightsGroup,
        **options: Unpack[PushArguments],
    ) -> PushedVersion:
        """Pushes as push_tensors does, but the tensors go by broadcasts in a torch.distributed group.

        Args:
            tensors: torch tensors by PEFT's names. With NCCL they go through the current GPU.
            group: The group of this process and the server. It ends if the push fails while tensors are sent.
        """
        options.setdefault("replicas", None)
        message = verbs.UploadTensors(
            name, "distributed", verbs.PushOptions(**options), group=group.name, timeout_s=group.timeout_s
        )
        return self._upload_shared(message, group.sending(tensors), config)

    def push_from_device(
        self, name: str, tensors: Mapping[str, Any], config: Mapping[str, Any], **options: Unpack[PushArguments]
    ) -> PushedVersion:
        """Pushes as push_tensors does, but the server copies the tensors out of this process's GPU, by CUDA IPC.

        Args:
            tensors: torch tensors by PEFT's names, all on one GPU of the server's node. On a server without a GPU, on
                the CPU.
        """
        options.setdefault("replicas", None)
        device, shared = shared_tensors(tensors)
        message = verbs.UploadTensors(name, "device", verbs.PushOptions(**options), device=device)
        return self._upload_shared(message, shared, config)

    def push_from(self, name: str, source: str, **options: Unpack[PushArguments]) -> Adapter:
        """Adds a new adapter, or a new version of an adapter, from a path or URI that the server reads."""
        return self._send(verbs.PushAdapter(name, source, **options))

    def download(
        self,
        name: str,
        to: str | os.PathLike[str] | None = None,
        *,
        version: int | None = None,
        force: bool = False,
    ) -> Downloaded:
        """Downloads an adapter to a folder, from which PEFT and `push` read the same adapter again.

        Args:
            to: The folder, which must be absent or empty. None: the last part of the name, in the current folder.
            version: None for the one that the name stands for.
            force: Replaces the files of an adapter that is in the folder already.

        Raises FileExistsError, and DownloadError if the files that came are not complete. The folder is unchanged then.
        """
        return self._download(verbs.DownloadAdapter(name, version), DownloadTarget(name, to, force))

    def alias(self, name: str, to: int | Mapping[int, float], alias: str | None = None) -> Adapter:
        """Points an alias to a version, or to several versions with weights. `alias` defaults to the adapter's own
        name."""
        return self._send(verbs.MoveAlias.to(name, to, alias))

    def unalias(self, name: str, alias: str) -> Adapter:
        """Removes an alias of an adapter."""
        return self._send(verbs.RemoveAlias(name, alias))

    def rollback(self, name: str, alias: str | None = None) -> Adapter:
        """Points an alias to what it stood for before its last move. `alias` defaults to the adapter's own name."""
        return self._send(verbs.RollBackAlias(name, alias))

    def pin(self, name: str, replicas: int = 1) -> Adapter:
        """Keeps an adapter in slots of so many replicas until it is unpinned. Only the operator may pin."""
        return self._send(verbs.PinAdapter(name, replicas))

    def unpin(self, name: str) -> Adapter:
        """Lets an adapter leave its slots when others need them."""
        return self._send(verbs.UnpinAdapter(name))

    def prefetch(self, name: str, replicas: int = 1) -> Prefetched:
        """Loads an adapter into the host memory of so many replicas before its first request."""
        return self._send(verbs.PrefetchAdapter(name, replicas))

    def verify(self, name: str) -> Verified:
        """Has the server read an adapter's files again and compare them with their digests."""
        return self._send(verbs.VerifyAdapter(name))

    def remove(self, name: str, wait_s: float = REMOVE_S) -> Removed:
        """Removes an adapter with all its versions, and waits up to `wait_s` seconds for its requests in flight."""
        return self._send(verbs.RemoveAdapter(name, wait_s))

    def places(self, name: str) -> AdapterPlaces:
        """Returns the replicas where an adapter is resident. The key must also have the scope infer."""
        return self._send(ShowPlaces(name))

    def list_places(self, after: str = "") -> PlacesPage:
        """Returns the same for a page of adapters, by name."""
        return self._send(ListPlaces(after))

    def quality(self) -> QualityList:
        """Returns the last run of every set of quality probes."""
        return self._send(ListQuality())

    def run_quality(self, model: str) -> Quality:
        """Runs a model's quality probes now."""
        return self._send(RunQuality(model))

    def accept_quality(self, model: str) -> Quality:
        """Runs a model's quality probes now and makes the result the new baseline."""
        return self._send(AcceptQuality(model))

    def sleep(self, level: SleepLevel = 1, mode: PauseMode = "abort") -> SleepStatus:
        """Gives the GPU memory of all replicas back to a trainer on the same GPUs. docs/trainers.md has the modes.

        Args:
            level: 1 copies the weights to host memory, 2 reads them from the checkpoint at the wake-up.
        """
        return self._send(SleepAll(level, mode))

    def wake_up(self, tags: Sequence[MemoryTag] = ALL_MEMORY) -> WakeStatus:
        """Takes these parts of the memory again. Generation goes on when no part is asleep."""
        return self._send(WakeUpAll(tuple(tags)))

    def is_sleeping(self) -> SleepState:
        """Returns whether any part of the GPU memory is given back."""
        return self._send(ShowSleep())

    def join_weights_group(self, join: JoinWeightsGroup) -> GroupAnswer:
        """Has the server join a process group; WeightsGroup calls it."""
        return self._send(join)

    def leave_weights_group(self, leave: LeaveWeightsGroup) -> GroupAnswer:
        """Has the server leave a process group; WeightsGroup calls it."""
        return self._send(leave)

    def _send(self, verb: Verb[AnswerT]) -> AnswerT:
        call = call_of(verb)
        return answer_of(verb, self._request(call, call.body))

    def _upload(self, verb: verbs.UploadAdapter, folder: Path) -> Adapter:
        with tempfile.TemporaryFile() as packed:
            num_bytes = pack(folder, packed)
            call = call_of(verb).with_body(TAR_TYPE, num_bytes)
            return answer_of(verb, self._request(call, _counted(packed, num_bytes, self._on_upload)))

    def _upload_tensors(
        self, verb: verbs.UploadTensors, tensors: Mapping[str, Any] | bytes, config: Mapping[str, Any]
    ) -> PushedVersion:
        parts = pack_tensors(tensors, config)
        num_bytes = sum(map(len, parts))
        call = call_of(verb).with_body(TENSORS_TYPE, num_bytes)
        return answer_of(verb, self._request(call, _sliced(parts, num_bytes, self._on_upload)))

    def _upload_shared(
        self, verb: verbs.UploadTensors, shared: SharedTensors, config: Mapping[str, Any]
    ) -> PushedVersion:
        with shared as fields:
            head = pack_shared(fields, config)
            call = call_of(verb).with_body(TENSORS_TYPE, len(head))
            return answer_of(verb, self._request(call, head))

    def _download(self, verb: verbs.DownloadAdapter, target: DownloadTarget) -> Downloaded:
        return _downloaded(self._http, verb, target, self._on_download)

    def _request(self, call: HttpCall, content: bytes | Iterator[bytes] | None) -> httpx.Response:
        with reaching(self._http.base_url):
            return self._http.request(call.method, call.path, params=call.query, headers=call.headers, content=content)


def _downloaded(
    http: httpx.Client, verb: verbs.DownloadAdapter, target: DownloadTarget, on_download: OnTransfer | None
) -> Downloaded:
    """Receives an adapter's files into a temporary folder, and moves them to the target when they are complete."""
    call = call_of(verb)
    with (
        reaching(http.base_url),
        http.stream(call.method, call.path, headers=call.headers, content=call.body) as response,
    ):
        if not response.is_success:
            response.read()
            raise status_error(response)
        with target.temporary_folder() as folder, receiving(verb.name, response, folder) as download:
            for chunk in response.iter_bytes():
                download.write(chunk)
                _report(download, on_download)
            return download.finish(target)


def _awaited(
    method: Callable[Concatenate[AdminClient, P], AnswerT],
) -> Callable[Concatenate[AsyncAdminClient, P], Coroutine[Any, Any, AnswerT]]:
    """Makes the asyncio version of a method of AdminClient. The method only makes a message and returns what `_send`,
    `_upload` or `_download` returns for it, and those of AsyncAdminClient return an awaitable."""

    @functools.wraps(method)
    async def awaited(client: AsyncAdminClient, /, *args: P.args, **kwargs: P.kwargs) -> AnswerT:
        sent = method(cast(AdminClient, client), *args, **kwargs)
        return await cast(Awaitable[AnswerT], sent)

    return awaited


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
        """Closes the connections to the server."""
        await self._http.aclose()

    async def list(self, after: str = "") -> AsyncIterator[Adapter]:
        """Yields all adapters after `after` in the order of their names; requests the next page when it is needed."""
        while True:
            page = await self.page(after, PAGE)
            for adapter in page.data:
                yield adapter
            if not page.has_more or page.last_id is None:
                return
            after = page.last_id

    page = _awaited(AdminClient.page)
    show = _awaited(AdminClient.show)
    push = _awaited(AdminClient.push)
    push_tensors = _awaited(AdminClient.push_tensors)
    push_from_distributed = _awaited(AdminClient.push_from_distributed)
    push_from_device = _awaited(AdminClient.push_from_device)
    push_from = _awaited(AdminClient.push_from)
    download = _awaited(AdminClient.download)
    alias = _awaited(AdminClient.alias)
    unalias = _awaited(AdminClient.unalias)
    rollback = _awaited(AdminClient.rollback)
    pin = _awaited(AdminClient.pin)
    unpin = _awaited(AdminClient.unpin)
    prefetch = _awaited(AdminClient.prefetch)
    verify = _awaited(AdminClient.verify)
    remove = _awaited(AdminClient.remove)
    places = _awaited(AdminClient.places)
    list_places = _awaited(AdminClient.list_places)
    quality = _awaited(AdminClient.quality)
    run_quality = _awaited(AdminClient.run_quality)
    accept_quality = _awaited(AdminClient.accept_quality)
    sleep = _awaited(AdminClient.sleep)
    wake_up = _awaited(AdminClient.wake_up)
    is_sleeping = _awaited(AdminClient.is_sleeping)
    join_weights_group = _awaited(AdminClient.join_weights_group)
    leave_weights_group = _awaited(AdminClient.leave_weights_group)

    async def _send(self, verb: Verb[AnswerT]) -> AnswerT:
        call = call_of(verb)
        return answer_of(verb, await self._request(call, call.body))

    async def _upload(self, verb: verbs.UploadAdapter, folder: Path) -> Adapter:
        with tempfile.TemporaryFile() as packed:
            call = call_of(verb).with_body(TAR_TYPE, await asyncio.to_thread(pack, folder, packed))
            return answer_of(verb, await self._request(call, _chunks(packed)))

    async def _upload_tensors(
        self, verb: verbs.UploadTensors, tensors: Mapping[str, Any] | bytes, config: Mapping[str, Any]
    ) -> PushedVersion:
        parts = await asyncio.to_thread(pack_tensors, tensors, config)
        num_bytes = sum(map(len, parts))
        call = call_of(verb).with_body(TENSORS_TYPE, num_bytes)
        return answer_of(verb, await self._request(call, _later(_sliced(parts, num_bytes, None))))

    async def _upload_shared(
        self, verb: verbs.UploadTensors, shared: SharedTensors, config: Mapping[str, Any]
    ) -> PushedVersion:
        with shared as fields:
            head = pack_shared(fields, config)
            call = call_of(verb).with_body(TENSORS_TYPE, len(head))
            return answer_of(verb, await self._request(call, head))

    async def _download(self, verb: verbs.DownloadAdapter, target: DownloadTarget) -> Downloaded:
        call = call_of(verb)
        with reaching(self._http.base_url):
            async with self._http.stream(call.method, call.path, headers=call.headers, content=call.body) as response:
                if not response.is_success:
                    await response.aread()
                    raise status_error(response)
                with target.temporary_folder() as folder, receiving(verb.name, response, folder) as download:
                    async for chunk in response.aiter_bytes(CHUNK_BYTES):
                        await asyncio.to_thread(download.write, chunk)
                    return await asyncio.to_thread(download.finish, target)

    async def _request(self, call: HttpCall, content: bytes | AsyncIterator[bytes] | None) -> httpx.Response:
        with reaching(self._http.base_url):
            return await self._http.request(
                call.method, call.path, params=call.query, headers=call.headers, content=content
            )


def _settings(url: str | None, key: str | None, timeout_s: float) -> dict[str, Any]:
    url = os.environ.get(URL_VARIABLE) or DEFAULT_URL if url is None else url
    key = os.environ.get(KEY_VARIABLE, "") if key is None else key
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        httpx.URL(url)
    except httpx.InvalidURL as error:
        raise APIError(f"{url!r} is not a URL: {error}. Use one such as {DEFAULT_URL}.") from error
    return {"base_url": url, "headers": headers, "timeout": timeout_s}


def _counted(packed: IO[bytes], num_bytes: int, on_upload: OnTransfer | None) -> Iterator[bytes]:
    while chunk := packed.read(CHUNK_BYTES):
        yield chunk
        if on_upload is not None:
            on_upload(packed.tell(), num_bytes)


def _sliced(parts: Sequence[bytes], num_bytes: int, on_upload: OnTransfer | None) -> Iterator[bytes]:
    num_sent = 0
    for packed in parts:
        part = memoryview(packed)
        for start in range(0, len(part), CHUNK_BYTES):
            chunk = part[start : start + CHUNK_BYTES]
            yield bytes(chunk)
            num_sent += len(chunk)
            if on_upload is not None:
                on_upload(num_sent, num_bytes)


async def _later(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


def _report(download: AdapterReceiver, on_download: OnTransfer | None) -> None:
    if on_download is not None and download.num_bytes:
        on_download(download.num_received, download.num_bytes)


async def _chunks(packed: IO[bytes]) -> AsyncIterator[bytes]:
    while chunk := await asyncio.to_thread(packed.read, CHUNK_BYTES):
        yield chunk
