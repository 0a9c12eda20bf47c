"""The replicas that call the directory: which are alive, ready or draining, and which orders they have to answer."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from lorafleet.api.telemetry.recent import RecentFailures
from lorafleet.cluster.directory.directory_messages import Order, OrderKind
from lorafleet.cluster.directory.directory_timing import DirectoryTiming
from lorafleet.cluster.directory.wake_signal import WakeSignal
from lorafleet.protocol.engine_control import EngineControl
from lorafleet.protocol.errors import Overloaded, WireError, from_wire
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest
from lorafleet.protocol.names import tenant_of


class _OpenOrder(NamedTuple):
    order: Order
    answer: asyncio.Future[AdapterInfo | None]
    since_s: float  # Seconds since 1970.


class LiveReplica:
    """The directory's record of one replica."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.acknowledged = -1  # Version of the names up to which its copies are known to be correct.
        self.is_ready = False  # Whether it may be ordered to load or pin an adapter.
        self.seen_s = clock()
        self.open_orders: dict[int, _OpenOrder] = {}  # By number.
        self.news = WakeSignal(clock)  # Comes with every order, and with every change of a name.

    @property
    def last_order(self) -> int:
        return max(self.open_orders, default=0)

    def orders_after(self, number: int) -> tuple[Order, ...]:
        return tuple(opened.order for opened in self.open_orders.values() if opened.order.number > number)


class ReplicaTable:
    """The replicas of one directory.

    Args:
        on_change: called when replicas have become ready, or are ready no more.
        on_left: called with a replica that has left, or counts as gone.
    """

    def __init__(
        self,
        timing: DirectoryTiming,
        clock: Callable[[], float],
        on_change: Callable[[], None],
        on_left: Callable[[str], None],
    ) -> None:
        self.failures = RecentFailures()  # Orders that failed.
        self.moved = WakeSignal(clock)  # Comes when a replica has joined, left or acknowledged a version.
        self._timing = timing
        self._clock = clock
        self._on_change = on_change
        self._on_left = on_left
        self._started_s = clock()
        self._replicas: dict[str, LiveReplica] = {}
        self._draining_since: dict[str, float] = {}
        self._order_numbers = itertools.count(1)
        self._ready_before: set[str] = set()
        self._change_scheduled: asyncio.TimerHandle | None = None

    def __contains__(self, replica_id: str) -> bool:
        return replica_id in self._replicas

    # -- life -----------------------------------------------------------------------------------------------------

    def record_call(self, replica_id: str) -> LiveReplica:
        """Records that the replica has just called, and returns its record."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            replica = self._replicas[replica_id] = LiveReplica(self._clock)
        replica.seen_s = self._clock()
        return replica

    def join(self, replica_id: str, is_ready: bool) -> LiveReplica:
        """Registers a replica, and forgets those that have been silent for forget_s."""
        for other, replica in list(self._replicas.items()):
            if self._clock() - replica.seen_s > self._timing.forget_s:
                self.forget(other)
        joined = self.record_call(replica_id)
        joined.is_ready = is_ready
        self.moved.wake()
        if self._change_scheduled is None:  # One call for all replicas that join within gather_s.
            loop = asyncio.get_running_loop()
            self._change_scheduled = loop.call_later(self._timing.gather_s, self._publish_joins)
        return joined

    def _publish_joins(self) -> None:
        self._change_scheduled = None
        self._on_change()

    def forget(self, replica_id: str) -> None:
        """Removes a replica that has left. Its orders fail with Overloaded."""
        replica = self._replicas.pop(replica_id, None)
        if replica is None:
            return
        for opened in replica.open_orders.values():
            if not opened.answer.done():
                opened.answer.set_exception(Overloaded(f"replica {replica_id} has left the cluster."))
        self.moved.wake()
        self._on_left(replica_id)
        self._on_change()

    def live(self) -> list[str]:
        silent_s = self._timing.acknowledge_s + self._timing.hold_s
        return [name for name, replica in self._replicas.items() if self._clock() - replica.seen_s < silent_s]

    def ready(self) -> list[str]:
        """Returns the live replicas that can be ordered to load or pin an adapter."""
        return [name for name in self.live() if self.is_ready(name) and not self.is_draining(name)]

    def is_ready(self, replica_id: str) -> bool:
        return self._replicas[replica_id].is_ready

    async def wait_for_ready(self, count: int) -> list[str]:
        """Returns the ready replicas. Until acknowledge_s after the start it waits for `count` of them, since the
        replicas of a restarted directory need time to join again."""
        deadline_s = self._started_s + self._timing.acknowledge_s
        while len(self.ready()) < count and await self.moved.wait(deadline_s):
            pass
        return self.ready()

    def notice_silent(self) -> None:
        """Reports a change if a replica has become silent, or has called again. Called every second."""
        ready = set(self.ready())
        if ready != self._ready_before:
            self._ready_before = ready
            self._on_change()

    # -- draining -------------------------------------------------------------------------------------------------

    def start_draining(self, replica_id: str) -> None:
        self._draining_since[replica_id] = self._clock()
        self._on_change()

    def end_draining(self, replica_id: str) -> None:
        self._draining_since.pop(replica_id, None)

    def is_draining(self, replica_id: str) -> bool:
        return replica_id in self._draining_since

    def overdue_drains(self) -> list[str]:
        """Returns the replicas that have been draining for more than forget_s."""
        earliest_s = self._clock() - self._timing.forget_s
        return [name for name, since_s in self._draining_since.items() if since_s < earliest_s]

    # -- names ----------------------------------------------------------------------------------------------------

    def wake_all(self) -> None:
        """Ends the watch calls that wait, since a name has changed."""
        for replica in self._replicas.values():
            replica.news.wake()

    def forget_acknowledgements(self) -> None:
        """Makes every replica acknowledge anew, since an epoch begins."""
        for replica in self._replicas.values():
            replica.acknowledged = -1

    def have_acknowledged(self, version: int) -> bool:
        """Returns whether all live replicas have acknowledged the version."""
        return all(self._replicas[name].acknowledged >= version for name in self.live())

    # -- orders ---------------------------------------------------------------------------------------------------

    def order(
        self, replica_id: str, kind: OrderKind, lora: LoRARequest, control: EngineControl | None = None
    ) -> asyncio.Future[AdapterInfo | None]:
        """Sends an order to a replica. The future has the answer that comes with a DoneCall, or Overloaded if the
        replica leaves first."""
        replica = self._replicas[replica_id]
        number = next(self._order_numbers)
        answer: asyncio.Future[AdapterInfo | None] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # Perhaps nobody waits for it.
        replica.open_orders[number] = _OpenOrder(Order(number, kind, lora, control), answer, time.time())
        replica.news.wake()
        return answer

    def end_order(self, replica_id: str, number: int, info: AdapterInfo | None, error: WireError | None) -> None:
        """Records a replica's answer to an order."""
        opened = self.record_call(replica_id).open_orders.pop(number, None)
        if opened is None or opened.answer.done():
            return
        if error is None:
            opened.answer.set_result(info)
            return
        name, failure = opened.order.lora.lora_name, from_wire(error)
        self.failures.record(failure, name, tenant_of(name), replica_id)
        opened.answer.set_exception(failure)

    def open_orders(self) -> Iterator[tuple[str, OrderKind, LoRARequest, float]]:
        """Yields the orders that replicas have not answered, with the time of each in seconds since 1970."""
        for replica_id, replica in self._replicas.items():
            for order, _, since_s in replica.open_orders.values():
                yield replica_id, order.kind, order.lora, since_s
