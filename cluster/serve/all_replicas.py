"""Asks all replicas of this deployment, including this one, on behalf of one of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from ray import serve

from lorafleet.api.stored.response_query import ResponseFound, ResponseQuery
from lorafleet.cluster.console.replica_view import ask_all
from lorafleet.cluster.console.view import ReplicaQuery, ReplicaView, Viewer
from lorafleet.cluster.receiving.group_orders import GroupDone, GroupOrder, ask_members
from lorafleet.cluster.serve.response_finding import find_response
from lorafleet.cluster.serve.scraping import scrape_all


class AllReplicas:
    """The replicas of one deployment.

    Args:
        render_own: Returns this replica's metrics.
        render_directory: Returns the directory's metrics.
    """

    def __init__(
        self, render_own: Callable[[], Awaitable[bytes]], render_directory: Callable[[], Awaitable[bytes]]
    ) -> None:
        self._render_own = render_own
        self._render_directory = render_directory

    async def scrape(self) -> bytes:
        return await scrape_all(all_replicas(), self._render_own, self._render_directory)

    async def look(self, query: ReplicaQuery, viewer: Viewer) -> list[ReplicaView]:
        return await ask_all(all_replicas(), query, viewer)

    async def find_response(self, query: ResponseQuery) -> ResponseFound | None:
        return await find_response(all_replicas(), query)

    async def ask_members(self, order: GroupOrder) -> GroupDone | None:
        return await ask_members(all_replicas(), order)


def all_replicas() -> Any:
    """Returns a handle of all replicas of this deployment, including this one."""
    context = serve.get_replica_context()
    return serve.get_deployment_handle(context.deployment, context.app_name)
