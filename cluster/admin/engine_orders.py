"""Has the engines of all replicas carry out the orders of trainers (protocol/engine_control.py).

A replica that joins during a pause is paused too, and one that joins during a sleep falls asleep. Both are remembered
in the directory's memory alone: after a restart of the directory the replicas stay paused or asleep until they are
ordered otherwise, and new ones are neither.
"""

from __future__ import annotations

from lorafleet.cluster.admin.replica_orders import ReplicaOrders
from lorafleet.cluster.directory.directory import AdapterDirectory
from lorafleet.cluster.directory.directory_messages import NO_ADAPTER
from lorafleet.protocol.engine_control import (
    ALL_MEMORY,
    EngineControl,
    PauseEngine,
    ResumeEngine,
    SleepEngine,
    SupersedeAdapter,
    WakeEngine,
)
from lorafleet.protocol.errors import InvalidRequest


class EngineOrders:
    def __init__(self, directory: AdapterDirectory, replicas: ReplicaOrders) -> None:
        self._directory = directory
        self._replicas = replicas
        self._pause: PauseEngine | None = None
        self._sleep: SleepEngine | None = None  # With all parts that are asleep.
        self._held: set[str] = set()  # Replicas that have had the orders of the present pause and sleep.

    async def order_all(self, control: EngineControl) -> list[str]:
        """Sends the order to all replicas, waits until each has carried it out, and returns the replicas.

        Raises the first error, and Overloaded if a replica takes longer than replica_orders.ORDER_S.
        """
        ready = await self._directory.replicas.wait_for_ready(1)
        self._held |= set(ready)
        before = self._sleep
        match control:
            case PauseEngine():
                self._pause = control
            case ResumeEngine():
                self._pause = None
            case SleepEngine():
                self._fall_asleep(control)
        lora = control.lora if isinstance(control, SupersedeAdapter) else NO_ADAPTER
        try:
            await self._replicas.order_all("control", lora, ready, control)
        except InvalidRequest:  # No replica has fallen asleep.
            self._sleep = before
            raise
        if isinstance(control, WakeEngine):  # After an error, replicas that join meanwhile sleep like the others.
            self._wake_up(control)
        return ready

    def follow(self) -> None:
        """Sends the present pause and sleep to replicas that have joined. Called when a replica joins or leaves."""
        ready = set(self._directory.replicas.ready())
        for replica in ready - self._held:
            for control in (self._pause, self._sleep):
                if control is not None:
                    self._directory.replicas.order(replica, "control", NO_ADAPTER, control)
        self._held = ready

    def _fall_asleep(self, control: SleepEngine) -> None:
        asleep = () if self._sleep is None else self._sleep.tags
        tags = tuple(tag for tag in ALL_MEMORY if tag in asleep or tag in control.tags)
        self._sleep = SleepEngine(control.level, "keep", tags)

    def _wake_up(self, control: WakeEngine) -> None:
        asleep = () if self._sleep is None else self._sleep.tags
        tags = tuple(tag for tag in asleep if tag not in control.tags)
        self._sleep = SleepEngine(self._sleep.level, "keep", tags) if self._sleep is not None and tags else None
