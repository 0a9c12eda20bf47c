"""A replica's copies of what names stand for, and its execution of the directory's orders.

The copies are refreshed by polling the directory, and are never used once they may be out of date. Orders come with the
answers. A call that finds the directory restarted is repeated, after this replica has brought the directory what it
knows. Every call has a time limit. While the directory is silent, calls fail at once, and copies are used as long as
the catalogue's log shows that they have not changed (catalogue/log_end.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from lorafleet.cluster.catalogue.catalogue_state import Served
from lorafleet.cluster.catalogue.log_end import LogEnd
from lorafleet.cluster.directory.directory_calls import (
    AdmitCall,
    Directory,
    DoneCall,
    FoundCall,
    JoinCall,
    LeaveCall,
    ListCall,
    LookupCall,
    ProgressCall,
    WatchCall,
)
from lorafleet.cluster.directory.directory_messages import Changes, Order, Progress, StaleEpoch
from lorafleet.cluster.directory.directory_timing import TIMING, DirectoryTiming
from lorafleet.cluster.directory.name_copies import NameCopies
from lorafleet.cluster.directory.neighbors import Neighbor
from lorafleet.cluster.task_set import TaskSet
from lorafleet.cluster.tenancy.quota_book import Ask, Verdict
from lorafleet.protocol.errors import DirectoryUnavailable, LorafleetError, to_wire
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest

READ_S = 10.0  # Time limit in seconds of administrative calls that only read.
CHANGE_S = 600.0  # Time limit in seconds of calls that change something; replicas may load adapters for minutes.
RETRY_AFTER_S = 2.0  # Seconds after which clients should repeat a failed call.

T = TypeVar("T")
logger = logging.getLogger("lorafleet.cluster")

Obey = Callable[[Order], Awaitable[AdapterInfo | None]]


class Membership:
    """A replica's membership of the directory.

    Args:
        obey: executes an order; a LorafleetError that it raises is the order's answer.
        log_end: without it, copies are not used after their lease.
        neighbor: where this replica sends adapters to other nodes; None if it sends none.
    """

    def __init__(
        self,
        directory: Directory,
        replica_id: str,
        obey: Obey,
        clock: Callable[[], float] = time.monotonic,
        log_end: LogEnd | None = None,
        timing: DirectoryTiming = TIMING,
        neighbor: Neighbor | None = None,
    ) -> None:
        self.directory = directory
        self.replica_id = replica_id
        self._obey = obey
        self._clock = clock
        self._log_end = log_end
        self._timing = timing
        self._neighbor = neighbor
        self._answered_s = clock()  # Time of the directory's last answer.
        self._ready = False
        self._epoch = ""
        self._order = 0  # Number of the last order.
        self._copies = NameCopies()
        self._lease_until = 0.0
        self._following: asyncio.Task[None] | None = None
        self._obeying = TaskSet()

    @property
    def epoch(self) -> str:
        """The epoch of the directory process that was joined last."""
        return self._epoch

    @property
    def fresh(self) -> bool:
        """Whether copies may be used: no write that they miss has been acknowledged to anybody."""
        return self._clock() < self._lease_until

    async def start(self) -> None:
        await self.call(lambda _: self._join(), self._timing.start_s, self._timing.start_s)
        self._following = asyncio.get_running_loop().create_task(self._follow())

    async def stop(self) -> None:
        if self._following is not None:
            self._following.cancel()
        self._obeying.cancel()
        await self.directory.ask(LeaveCall(self.replica_id))

    async def become_ready(self) -> None:
        """Allows the directory to order this replica to load adapters from now on."""
        self._ready = True
        await self.call(lambda _: self._join())

    async def lookup(self, name: str) -> Served | None:
        """Returns what the name stands for, from the copy while it may be used, else from the directory."""
        copy, is_known = self._copies.get(name), name in self._copies
        if is_known and (self.fresh or await self._is_unchanged(name, copy)):
            return copy
        return self._copies.add(name, await self.call(lambda epoch: self.directory.ask(LookupCall(epoch, name))))

    async def found(self, lora: LoRARequest) -> Served | None:
        """Records an adapter that a resolver has found. Returns another replica's adapter if that one was first."""
        found = await self.call(lambda epoch: self.directory.ask(FoundCall(epoch, lora)))
        return self._copies.add(lora.lora_name, found)

    async def listed(self, after: str, end: str, limit: int) -> list[LoRARequest]:
        """Returns the adapters of public names, in order; see AdapterNames.list_loras."""
        return await self.call(lambda epoch: self.directory.ask(ListCall(epoch, after, end, limit)))

    @property
    def list_version(self) -> tuple[str, int] | None:
        """A value that changes whenever a public name may stand for something else; None if that is not known now."""
        return (self._epoch, self._copies.version) if self.fresh else None

    async def admit(self, asks: list[Ask], charges: dict[str, int], running: dict[str, int]) -> list[Verdict]:
        """Requests admission against the quotas. Raises DirectoryUnavailable after admit_s."""
        call = AdmitCall(self.replica_id, asks, charges, running)
        return await self.call(lambda _: self.directory.ask(call), self._timing.admit_s)

    async def publish_progress(self, text: str, *, failed: bool = False) -> None:
        logger.log(logging.ERROR if failed else logging.INFO, "replica %s: %s", self.replica_id, text)
        progress = Progress(self.replica_id, text, failed)
        await self.call(lambda _: self.directory.ask(ProgressCall(progress)))

    async def call(
        self, call: Callable[[str], Awaitable[T]], limit_s: float | None = None, patience_s: float | None = None
    ) -> T:
        """Makes a call to the directory with its epoch, and repeats it while the directory is away.

        Raises DirectoryUnavailable after limit_s seconds, or once the directory has been silent for patience_s seconds.
        Both default to the timing's. The directory may still do what was requested.
        """
        patience_s = self._timing.patience_s if patience_s is None else patience_s
        deadline_s = self._clock() + (self._timing.patience_s if limit_s is None else limit_s)
        if self._following is None:
            self._answered_s = self._clock()  # Polling has not begun yet, so silence means nothing.
        if self._clock() >= self._answered_s + patience_s:
            raise _unavailable(self._clock() - self._answered_s)
        calling = asyncio.get_running_loop().create_task(self._repeat(call))
        try:
            while not calling.done():
                ends_s = min(deadline_s, self._answered_s + patience_s)
                if self._clock() >= ends_s:
                    raise _unavailable(self._clock() - self._answered_s)
                await asyncio.wait([calling], timeout=ends_s - self._clock())
            return calling.result()
        finally:
            calling.cancel()

    async def _repeat(self, call: Callable[[str], Awaitable[T]]) -> T:
        stale = False
        while True:
            try:
                if stale:
                    await self._join()
                stale = False
                answer = await call(self._epoch)
                self._answered_s = self._clock()
                return answer
            except LorafleetError:
                raise
            except StaleEpoch:
                stale = True
            except Exception as error:  # The directory is being restarted.
                logger.debug("replica %s: the adapter directory does not answer: %r", self.replica_id, error)
                await asyncio.sleep(self._timing.retry_s)

    async def _is_unchanged(self, name: str, copy: Served | None) -> bool:
        """Returns whether the catalogue's log shows that this name has not changed since the copies were correct."""
        changed = None if self._log_end is None else await self._log_end.changed_since(self._copies.log)
        return changed is not None and changed.isdisjoint((name, name if copy is None else copy.adapter))

    async def _follow(self) -> None:
        while True:
            try:
                sent_s = self._clock()
                call = WatchCall(self.replica_id, self._epoch, self._copies.version, self._order)
                changes = await self.directory.ask(call)
                self._answered_s = self._clock()
                self._adopt(changes, sent_s)
            except StaleEpoch:
                await self._try_to_join()
            except Exception as error:  # The directory is being restarted.
                logger.warning("replica %s: the adapter directory does not answer: %r", self.replica_id, error)
                await asyncio.sleep(self._timing.retry_s)

    async def _try_to_join(self) -> None:
        try:
            await self._join()
        except Exception as error:  # The directory has gone again.
            logger.warning("replica %s: cannot join the adapter directory: %r", self.replica_id, error)
            await asyncio.sleep(self._timing.retry_s)

    async def _join(self) -> None:
        sent_s = self._clock()
        copies = self._copies
        call = JoinCall(self.replica_id, self._epoch, copies.names, copies.found, self._ready, self._neighbor)
        changes = await self.directory.ask(call)
        self._answered_s = self._clock()
        copies.forget_absent()
        if changes.epoch != self._epoch:
            self._epoch, self._order = changes.epoch, 0
            copies.begin_epoch()
        self._adopt(changes, sent_s)

    def _adopt(self, changes: Changes, sent_s: float) -> None:
        """Applies changes to the copies and executes orders."""
        if changes.epoch != self._epoch or changes.version < self._copies.version:
            return  # The answer of another call has overtaken this one.
        self._copies.apply(changes)
        self._lease_until = sent_s + self._timing.lease_s
        for order in changes.orders:
            if order.number > self._order:
                self._order = order.number
                self._obeying.start(self._answer(order, self._epoch))

    async def _answer(self, order: Order, epoch: str) -> None:
        info, error = None, None
        try:
            info = await self._obey(order)
        except LorafleetError as refused:
            error = to_wire(refused)
        except Exception as fault:
            logger.exception("replica %s: order %s failed", self.replica_id, order)
            error = to_wire(LorafleetError(f"{order.kind} failed: {fault!r}"))
        try:
            await self.directory.ask(DoneCall(self.replica_id, epoch, order.number, info, error))
        except Exception as gone:  # A restarted directory sends its own orders.
            logger.warning("replica %s: the answer to order %d was lost: %r", self.replica_id, order.number, gone)


def _unavailable(silent_s: float) -> DirectoryUnavailable:
    return DirectoryUnavailable(
        f"The adapter directory does not answer (its last answer was {silent_s:.0f} s ago). Requests for adapters that "
        "this replica knows are still served. Try again; before you repeat a change, check whether it was made.",
        retry_after_s=RETRY_AFTER_S,
    )
