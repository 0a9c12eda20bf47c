"""Links one replica to the directory: its membership, and the calls that its routes make there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from lorafleet.cluster.batches.batch_bounds import BATCH_TURN_S
from lorafleet.cluster.catalogue.catalogue_store import open_store
from lorafleet.cluster.catalogue.log_end import LogEnd
from lorafleet.cluster.console.console_calls import ViewAdapterCall, ViewCall
from lorafleet.cluster.console.view import AdapterView, DirectoryView, Viewer, ViewQuery
from lorafleet.cluster.directory import directory_metrics
from lorafleet.cluster.directory.directory_actor import DirectoryPlace, get_or_create
from lorafleet.cluster.directory.directory_calls import CountsCall, DrainCall
from lorafleet.cluster.directory.directory_messages import Order
from lorafleet.cluster.directory.directory_timing import TIMING
from lorafleet.cluster.directory.membership import CHANGE_S, READ_S, Membership
from lorafleet.cluster.directory.neighbors import Neighbor
from lorafleet.cluster.quality.monitor import TURN_S
from lorafleet.protocol.admin_verbs import TakeLease, Verb
from lorafleet.protocol.lora_request import AdapterInfo

AnswerT = TypeVar("AnswerT")

logger = logging.getLogger("lorafleet.cluster")


class DirectoryLink:
    """One replica's link to the directory. `execute` carries out the directory's orders to the replica, and `neighbor`
    says where the replica sends adapters to other nodes."""

    def __init__(
        self,
        place: DirectoryPlace,
        replica_id: str,
        execute: Callable[[Order], Awaitable[AdapterInfo | None]],
        neighbor: Neighbor | None = None,
    ) -> None:
        self.place = place
        self._replica_id = replica_id
        self._directory = get_or_create(place)
        log_end = LogEnd(lambda: open_store(place.uri))
        self.membership = Membership(self._directory, replica_id, execute, log_end=log_end, neighbor=neighbor)

    async def administer(self, verb: Verb[AnswerT]) -> AnswerT:
        limit_s = READ_S if verb.quick else CHANGE_S
        return await self.membership.call(lambda _: self._directory.administer(verb), limit_s)

    async def take_quality_turn(self) -> bool:
        """Takes or renews the lease of the replica that runs the quality probes."""
        return await self.administer(TakeLease("quality", self._replica_id, TURN_S))

    async def take_batch_turn(self) -> bool:
        """Takes or renews the lease of the replica that runs the batches."""
        return await self.administer(TakeLease("batches", self._replica_id, BATCH_TURN_S))

    async def view(self, query: ViewQuery, viewer: Viewer) -> DirectoryView:
        return await self.membership.call(lambda _: self._directory.look(ViewCall(query, viewer)))

    async def view_adapter(self, name: str, viewer: Viewer) -> AdapterView | None:
        return await self.membership.call(lambda _: self._directory.look(ViewAdapterCall(name, viewer)))

    async def render_metrics(self) -> bytes:
        return directory_metrics.render(await self.membership.call(lambda _: self._directory.ask(CountsCall())))

    async def hand_over(self) -> None:
        """Makes other replicas load the requested adapters that only this one holds. Waits at most hand_over_s
        seconds."""
        try:
            await asyncio.wait_for(self._directory.ask(DrainCall(self._replica_id)), TIMING.hand_over_s)
        except Exception as error:  # The replica stops all the same.
            logger.warning("replica %s leaves without handing over its adapters: %r", self._replica_id, error)

    async def close(self) -> None:
        with contextlib.suppress(Exception):  # Expected while the whole cluster shuts down.
            await self.membership.stop()
        self._directory.close()
