"""Sends a request to a replica that already holds its adapter.

AffinityRouter runs in every process that has a handle to the replicas, and follows the directory; AdapterRouter is the
deployment that HAProxy asks, with the request's body.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from lorafleet.cluster import ingress
from lorafleet.cluster.directory_actor import DirectoryPlace, get_or_create
from lorafleet.cluster.model_name import find_adapter
from lorafleet.cluster.routing import ReplicaChooser

RETRY_S = 0.2

logger = logging.getLogger("lorafleet.cluster")

Message = dict[str, Any]


class AffinityRouter(RequestRouter):
    """Ray Serve's extension point. Never refuses: any replica answers any adapter correctly."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._directory = DirectoryPlace(self.app_name, **kwargs["directory"])
        self._chooser = ReplicaChooser()
        self._following: asyncio.Task[None] | None = None

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if self._following is None:  # not before: the handles of cluster/scraping.py never choose
            self._following = self._event_loop.create_task(self._follow_directory())
        adapter = pending_request.kwargs.get("adapter", "") if pending_request else ""
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        ranked = self._chooser.rank(adapter, list(by_id))
        if ranked:
            self._chooser.count(ranked[0])
        return [[by_id[replica_id]] for replica_id in ranked]

    async def _follow_directory(self) -> None:
        while True:
            try:
                directory = get_or_create(self._directory)
                while True:
                    self._chooser.update(await directory.routes(self._chooser.table.version))
            except Exception as error:  # the directory is being restarted; the last table still serves
                logger.warning("the adapter directory does not answer: %r", error)
                await asyncio.sleep(RETRY_S)


class RouteApp:
    """ASGI: `POST /internal/route` -> {"replica_id": …}. Without a framework, as every request waits for it."""

    def __init__(self, choose: Callable[[str], Awaitable[str]]) -> None:
        self._choose = choose

    async def __call__(self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Any) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            replica_id = await self._choose(find_adapter(await _body(receive)))
            await _answer(send, {"replica_id": replica_id, "request_headers": {}})


async def _lifespan(receive: Callable[[], Awaitable[Message]], send: Any) -> None:
    while (message := await receive())["type"] != "lifespan.shutdown":
        await send({"type": f"{message['type']}.complete"})
    await send({"type": "lifespan.shutdown.complete"})


async def _body(receive: Callable[[], Awaitable[Message]]) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _answer(send: Any, content: dict[str, Any]) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class AdapterRouter:
    """One on every node that has an HAProxy; cluster/app.py makes the deployment of it."""

    def __init__(self, replicas: DeploymentHandle[Any]) -> None:
        self._replicas = replicas
        ingress.start_handle(replicas)

    def __serve_build_asgi_app__(self) -> RouteApp:
        return RouteApp(lambda adapter: ingress.choose(self._replicas, adapter))
