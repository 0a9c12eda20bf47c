"""Runs one replica in Ray Serve. It consists of the HTTP front of one engine and the engine's worker processes, one for
each rank.

A replica joins the directory, starts its parts (replica_parts.py), and then serves the API of api/routes. It ends when
a worker ends, so that Serve replaces them all.
"""

from __future__ import annotations

import sys

from fastapi import FastAPI

from lorafleet.api.access.work_threads import UPKEEP, in_turn
from lorafleet.api.stored.response_query import ResponseFound, ResponseQuery
from lorafleet.cluster.batches.batch_records import callers_of
from lorafleet.cluster.batches.line_post import LineAnswerer, LinePost, LineReply
from lorafleet.cluster.config import AppArgs
from lorafleet.cluster.console.view import ReplicaQuery, ReplicaView, Viewer
from lorafleet.cluster.deploys.changed_options import UserConfig
from lorafleet.cluster.deploys.deployment_version import Deployed
from lorafleet.cluster.deploys.running_check import ProposedDeploy
from lorafleet.cluster.deploys.wanted_options import WantedOptions
from lorafleet.cluster.directory.directory_actor import SWITCH_S
from lorafleet.cluster.proxy import ingress
from lorafleet.cluster.receiving.group_orders import GroupDone, GroupOrder
from lorafleet.cluster.routing.route import Route
from lorafleet.cluster.serve.autoscaling import autoscaling_metrics
from lorafleet.cluster.serve.replica_parts import ReplicaParts
from lorafleet.cluster.serve.start_checks import check_paths
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import LorafleetError, Overloaded
from lorafleet.resolvers.private_files import keep_private

SILENT_S = 2.0  # An engine that has sent nothing for this long gets no new requests. It sends something every second.


class StartFailed(RuntimeError):
    """Carries one line for Serve's status. The cause has been logged and recorded in the directory."""


class EngineReplica:
    """The actor of one replica. cluster/serve/app.py makes a Serve deployment of it."""

    def __init__(self, args: AppArgs, config: EngineConfig, deployed: Deployed) -> None:
        """Prepares the replica without starting it."""
        keep_private()
        ingress.listen_on_node_address()
        sys.setswitchinterval(SWITCH_S)  # Threads write /metrics and long answers while the event loop runs.
        self._parts = ReplicaParts(args, config, deployed)
        self._version = deployed.version
        self._options = WantedOptions(self._parts)
        self._lines: LineAnswerer | None = None  # None until the replica has started.
        ingress.answer_health_checks(self._is_well)

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Starts the replica, and returns its HTTP application. Serve calls this once, after the constructor."""
        membership = self._parts.link.membership
        await membership.start()
        try:
            app = await self._parts.start()
        except Exception as error:
            cause = error.message if isinstance(error, LorafleetError) else repr(error)
            await membership.publish_progress(cause, failed=True)
            await self._parts.close()
            raise StartFailed(cause) from None
        state = self._parts.state
        assert state is not None
        self._lines = LineAnswerer(app, callers_of(state.access.gate))
        return app

    async def reconfigure(self, user_config: UserConfig) -> None:
        """Takes the options that need no other replica. Serve calls this at the start, and for each deploy that changes
        some of them."""
        await self._options.take(user_config)

    async def check_deploy(self, proposed: ProposedDeploy) -> str | None:
        """Returns why this replica could not take the options of a deploy, or None. A replica that the deploy would
        replace objects only if it would stop for one that misses files. build() calls this."""
        if self._parts.state is None:
            return None
        try:
            if proposed.version == self._version:
                await self._parts.check_options(proposed.args)
            elif proposed.is_final:
                await in_turn(UPKEEP, check_paths, proposed.args)
        except LorafleetError as error:
            return error.message
        return None

    async def finish(self) -> int:
        """Rejects new requests from now on, and returns the number of those in progress. `lorafleet serve` calls this
        while it ends."""
        return self._parts.finish()

    async def check_health(self) -> None:
        """Raises EngineDead if the engine or a rank has failed. Serve then replaces the replica."""
        await self._parts.check_health()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the replica's load. Serve calls this if the number of replicas follows the load."""
        engine = self._parts.engine
        if engine is None:
            return {}
        return autoscaling_metrics(engine.stats, self._parts.config.max_num_seqs, engine.hello.kv_cache_tokens)

    async def render_metrics(self) -> bytes:
        """Returns the metrics of this replica alone. Other replicas call it."""
        return await self._parts.render_metrics()

    async def look(self, query: ReplicaQuery, viewer: Viewer) -> ReplicaView | None:
        """Returns the console's view of this replica, or None while it starts. Other replicas call it."""
        return self._parts.look(query, viewer)

    async def find_response(self, query: ResponseQuery) -> ResponseFound | None:
        """Carries out a query for a stored response, if this replica has it. Other replicas call it."""
        return await self._parts.find_response(query)

    async def obey_group_order(self, order: GroupOrder) -> GroupDone | None:
        """Carries out an order for a trainer's process group, if this replica is its member. Other replicas call it."""
        return await self._parts.obey_group_order(order)

    async def answer_line(self, post: LinePost, route: Route) -> LineReply:  # noqa: ARG002  # The router reads it.
        """Answers one line of a batch. The replica that runs the batch calls it."""
        if self._lines is None:
            raise Overloaded("This replica is starting.")
        return await self._lines.answer(post)

    async def __del__(self) -> None:
        """Hands over to the other replicas, and stops. Serve calls this when the replica's requests have been
        answered."""
        engine = self._parts.engine
        if engine is not None and engine.dead is None:
            await self._parts.link.hand_over()
        self._options.close()
        await self._parts.close()

    def _is_well(self) -> bool:
        """Returns whether requests should come here: the engine is alive and has sent something in the last SILENT_S
        seconds. This is also true while the replica starts."""
        engine = self._parts.engine
        return engine is None or (engine.dead is None and engine.stats_age_s < SILENT_S)
