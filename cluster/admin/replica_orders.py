"""Chooses the replicas that load an adapter, sends them orders, and waits for their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from lorafleet.cluster.directory.directory import AdapterDirectory
from lorafleet.cluster.directory.directory_messages import OrderKind
from lorafleet.cluster.routing.rendezvous import Rendezvous, key_of
from lorafleet.protocol.engine_control import EngineControl
from lorafleet.protocol.errors import InvalidRequest, LorafleetError, Overloaded
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest

ORDER_S = 300.0  # Seconds that a replica may take to load an adapter.


class ReplicaOrders:
    def __init__(self, directory: AdapterDirectory) -> None:
        self._directory = directory

    async def homes(self, name: str, count: int | None) -> list[str]:
        """Returns the `count` replicas that should have the adapter; None for all. Raises InvalidRequest if there are
        fewer."""
        live = await self._directory.replicas.wait_for_ready(count or 1)
        if count is None and live:
            return live
        count = count or 1
        if not 1 <= count <= len(live):
            raise InvalidRequest(
                f"replicas is {count}; this cluster has {len(live)} now. Request 1 to {len(live)}, or add replicas.",
                "replicas",
            )
        return ring_of(live).first(key_of(name), count)

    async def order_all(
        self, kind: OrderKind, lora: LoRARequest, replicas: Iterable[str], control: EngineControl | None = None
    ) -> list[AdapterInfo | None]:
        """Sends the order to the replicas and returns their answers. Raises the first error, with its replica's id, and
        Overloaded if a replica does not answer within ORDER_S seconds."""
        orders = {replica: self._directory.replicas.order(replica, kind, lora, control) for replica in replicas}
        if orders:
            await asyncio.wait(orders.values(), timeout=ORDER_S)
        for replica, answer in orders.items():
            if not answer.done():
                raise Overloaded(f"replica {replica} did not {_named(kind, lora)} within {ORDER_S:.0f} s.")
            error = answer.exception()
            if isinstance(error, LorafleetError):
                raise type(error)(f"replica {replica}: {error.message}", error.param)
        return [answer.result() for answer in orders.values()]

    async def drop_everywhere(self, lora: LoRARequest) -> None:
        """Drops the adapter on every live replica, and waits for as long as requests use it. A replica that leaves
        takes its copy with it."""
        orders = [self._directory.replicas.order(replica, "drop", lora) for replica in self._directory.replicas.live()]
        if orders:
            await asyncio.wait(orders)


def _named(kind: OrderKind, lora: LoRARequest) -> str:
    return f"{kind} adapter {lora.lora_name!r}" if lora.lora_name else "carry out the order"


def ring_of(replicas: Iterable[str]) -> Rendezvous:
    """Returns a ring with equal weights, like the routers' own, so that adapters are where routers look for them
    first."""
    return Rendezvous(dict.fromkeys(replicas, 1.0))
