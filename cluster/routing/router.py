"""Sends a request to a replica that already holds its adapter.

AffinityRouter runs in every process that has a handle to the replicas, and follows the directory. AdapterRouter is
the deployment that HAProxy asks, with the request's body.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from ray.exceptions import ActorDiedError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.datastructures import Headers

from lorafleet.api.access.caller import sent_key
from lorafleet.api.access.gate import Gate
from lorafleet.api.access.work_threads import on_duty
from lorafleet.cluster.deploys.changed_options import UserConfig, opened
from lorafleet.cluster.deploys.sealed_secrets import unseal
from lorafleet.cluster.directory.directory_actor import DirectoryPlace, get_or_create
from lorafleet.cluster.directory.directory_calls import DrainCall, RoutesCall
from lorafleet.cluster.directory.residency import RouteView
from lorafleet.cluster.proxy import ingress
from lorafleet.cluster.routing.route import NO_ROUTE, Route, route_of_session
from lorafleet.cluster.routing.route_app import RouteApp
from lorafleet.cluster.routing.simple_rules import make_chooser
from lorafleet.cluster.task_set import TaskSet
from lorafleet.cluster.tenancy.key_ring import KeyRing
from lorafleet.protocol.errors import Forbidden, Unauthorized

RETRY_S = 0.1
SILENT_S = 2.0  # The directory answers this router at least once a second. After so long its loads are out of date.

logger = logging.getLogger("lorafleet.cluster")


class AffinityRouter(RequestRouter):
    """Extends Ray Serve's request router by the rule of `--routing`.

    It never rejects a request, since any replica can answer for any adapter.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        self._directory = DirectoryPlace(self.app_name, **kwargs["directory"])
        self._view = RouteView(make_chooser(kwargs["routing"]))
        self._by_id: dict[str, RunningReplica] = {}
        self._following: asyncio.Task[None] | None = None
        self._answered_s = time.monotonic()  # Time of the directory's last answer.
        self._drain_tasks = TaskSet()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        before, self._by_id = self._by_id, {replica.replica_id.unique_id: replica for replica in replicas}
        self._view.chooser.set_replicas(self._by_id)
        if self._following is not None:
            for replica_id in before.keys() - self._by_id.keys():
                self._drain_tasks.start(self._drain_replica(replica_id))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if self._following is None:  # Not earlier: the handles of cluster/serve/scraping.py never choose.
            self._following = self._event_loop.create_task(self._follow_directory())
        if not candidate_replicas:  # Otherwise they are all those of update_replicas().
            return []
        route = _route_of(pending_request) if pending_request is not None else NO_ROUTE
        adapter = "" if route.name in self._directory.base_names else self._view.adapter(route.name)
        chooser = self._view.chooser
        is_current = time.monotonic() - self._answered_s < SILENT_S
        ranked = chooser.rank(adapter, route.prefixes, by_load=is_current)
        if ranked:
            chooser.sent(adapter, ranked[0], route.num_tokens, route.prefixes)
        return [[self._by_id[replica_id]] for replica_id in ranked]

    async def _drain_replica(self, replica_id: str) -> None:
        """Informs the directory that a replica stops, so that its adapters are elsewhere before requests for them
        are."""
        try:
            await get_or_create(self._directory).ask(DrainCall(replica_id))
        except Exception as error:  # The replica informs it again.
            logger.warning("the adapter directory was not informed that replica %s stops: %r", replica_id, error)

    async def _follow_directory(self) -> None:
        directory = get_or_create(self._directory)
        while True:
            try:
                self._view.apply(await directory.ask(RoutesCall(self._view.epoch, self._view.version)))
                self._answered_s = time.monotonic()
            except ActorDiedError:  # It had ended because no replica was left.
                directory = get_or_create(self._directory)
            except Exception as error:  # The directory is being restarted; the last routes still serve.
                logger.warning("the adapter directory does not answer: %r", error)
                await asyncio.sleep(RETRY_S)


def _route_of(request: PendingRequest) -> Route:
    """Returns the route that AdapterRouter has passed, or else the one that proxy_affinity.py has read."""
    given: Route | None = request.kwargs.get("route")
    return given or route_of_session(request.metadata.session_id)


class AdapterRouter:
    """The router on each node that has an HAProxy. cluster/serve/app.py makes a Serve deployment of it."""

    def __init__(
        self,
        replicas: DeploymentHandle[Any],
        admin_key: str | None = None,
        api_keys: str | None = None,
        traced: bool = False,
    ) -> None:
        self._replicas = replicas
        self._traced = traced
        keys = self._keys = None if api_keys is None else KeyRing(api_keys)
        self._source = api_keys
        self._gate = Gate(admin_key, None if keys is None else lambda: keys.keys)
        loop = asyncio.get_event_loop()
        self._tasks = [loop.create_task(ingress.keep_certificate())]
        if keys is not None:
            self._tasks.append(loop.create_task(keys.follow()))
        ingress.listen_on_node_address()
        ingress.start_handle(replicas)

    async def reconfigure(self, user_config: UserConfig) -> None:
        """Takes the keys of another deploy. Serve calls this at the start, and for each deploy that changes them.

        An error here would make Serve stop this router, so the former keys stay if the new ones cannot be read."""
        try:
            keys = opened(user_config, unseal)
            if self._keys is not None and keys["api_keys"] != self._source:
                await on_duty(self._keys.change_source, keys["api_keys"])
                self._source = keys["api_keys"]
            self._gate.set_admin_key(keys["admin_key"])
        except Exception:
            logger.exception("the router keeps the former keys, since the new ones cannot be read")

    def _admits(self, headers: Headers) -> bool:
        """Returns whether a replica would let a client with these headers infer. Without API keys it lets everyone."""
        try:
            self._gate.caller(sent_key(headers), "infer")
        except (Unauthorized, Forbidden):
            return False
        return True

    def __serve_build_asgi_app__(self) -> RouteApp:
        return RouteApp(lambda route: ingress.choose(self._replicas, route), admits=self._admits, traced=self._traced)
