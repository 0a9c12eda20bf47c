"""Connects the batches of a server to its replicas: one replica runs them, and any replica answers their lines."""

from __future__ import annotations

import asyncio
from typing import Any

from lorafleet.cluster.batches.line_post import LinePost, LineReply
from lorafleet.cluster.routing.route import read_route


class ReplicaPosts:
    """Sends lines to the replicas that should answer them, as AffinityRouter chooses.

    Args:
        replicas: A handle whose deployment has answer_line().
    """

    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas

    async def __call__(self, post: LinePost) -> LineReply:
        answering = self._replicas.answer_line.remote(post, route=read_route(post.body))
        try:
            reply: LineReply = await answering
        except asyncio.CancelledError:
            answering.cancel()
            raise
        return reply
