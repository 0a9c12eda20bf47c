"""Lets an engine fall asleep, and wakes it up.

The orders are carried out one after the other. A sleep first pauses the engine in its own way, whatever pause is in
force. While the engine is asleep nothing is scheduled. Waiting requests go on to wait, and running ones have been
preempted, so that they are computed again after the wake-up.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Literal

from lorafleet.protocol.engine_control import PauseMode, SleepEngine, WakeEngine
from lorafleet.protocol.errors import InvalidRequest, LorafleetError
from lorafleet.workers.pool.pool_room import PoolRoom
from lorafleet.workers.schedule.scheduler import Scheduler
from lorafleet.workers.slots.worker_manager import WorkerLoRAManager
from lorafleet.workers.step.runner import ModelRunner

log = logging.getLogger(__name__)


class EngineSleep:
    """The sleep of one engine.

    Args:
        abort_all: Ends all sequences.
        is_quiet: Returns whether a pause of this mode has come about.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        abort_all: Callable[[], None],
        is_quiet: Callable[[PauseMode], bool],
    ) -> None:
        self.hold: PauseMode | Literal[""] = ""  # The pause that the sleep demands; "" while awake.
        self.awaits_copies = False  # Whether something is awaited whose end nobody announces.
        self._scheduler = scheduler
        self._runner = runner
        self._abort_all = abort_all
        self._is_quiet = is_quiet
        self._orders: deque[tuple[SleepEngine | WakeEngine, Future[None]]] = deque()
        self._present: tuple[Iterator[None], Future[None]] | None = None

    def take(self, control: SleepEngine | WakeEngine) -> Future[None]:
        """Takes an order for this or later steps. Raises InvalidRequest if it cannot be carried out."""
        if isinstance(control, SleepEngine) and control.level == 2 and not self._runner.memory.reloads:
            raise InvalidRequest(
                "level 2 is not served with model_impl=transformers, whose weights are not read again; use level 1.",
                "level",
            )
        done: Future[None] = Future()
        self._orders.append((control, done))
        self.advance()
        return done

    def advance(self) -> None:
        """Does what can be done now for the orders. Call it at the end of each step."""
        while self._present is not None or self._orders:
            if self._present is None:
                control, done = self._orders.popleft()
                work = self._fall_asleep(control) if isinstance(control, SleepEngine) else self._wake_up(control)
                self._present = work, done
            work, done = self._present
            try:
                next(work)
                return
            except StopIteration:
                self._present = None
                done.set_result(None)
            except LorafleetError as error:
                self._present = None
                done.set_exception(error)

    def _fall_asleep(self, control: SleepEngine) -> Iterator[None]:
        memory, loras = self._runner.memory, self._runner.loras
        tags = frozenset(control.tags) - memory.asleep
        if not memory.asleep:
            self.hold = control.mode
            if control.mode == "abort":
                self._abort_all()
            while not self._is_quiet(control.mode):
                yield
            self.hold = "keep"
            self._runner.steps.late.is_suspended = True
        if not tags:
            return
        for sequence in list(self._scheduler.running):
            self._scheduler.preempt(sequence)
        if loras is not None and loras.filler.pool is not None:
            yield from self._recall(loras, loras.filler.pool)
        if "kv_cache" in tags:
            self.awaits_copies = True
            # Blocks and snapshots may still arrive from a lower tier, for sequences that were preempted.
            while not self._scheduler.memory.is_unused:
                yield
            self.awaits_copies = False
            self._scheduler.memory.leave_gpu()
        if "weights" in tags and loras is not None:
            loras.empty_slots()
        yield from memory.release(tags, control.level)

    def _forget_former_base(self) -> None:
        """Forgets what was computed from the weights that the base had before. Nothing finds it any more, since its
        keys have the former digest; but it takes memory."""
        loras = self._runner.loras
        self._scheduler.memory.flush()
        num_adapters = 0 if loras is None else loras.forget_packed()
        log.warning(
            "the checkpoint has changed during the sleep: the base has other weights now, with the digest %s. What was "
            "computed from the former ones was forgotten: keys and values in all tiers, states, and the adapters in "
            "host memory (%d)",
            self._runner.memory.base.digest,
            num_adapters,
        )

    def _recall(self, loras: WorkerLoRAManager, pool: PoolRoom) -> Iterator[None]:
        """Gives the KV cache back what adapters have borrowed of it."""
        if not pool.num_blocks:
            return
        loras.empty_slots()
        self.awaits_copies = True
        while pool.num_blocks:
            pool.recall()
            yield
        self.awaits_copies = False

    def _wake_up(self, control: WakeEngine) -> Iterator[None]:
        memory = self._runner.memory
        tags = frozenset(control.tags) & memory.asleep
        num_changes = memory.base.num_changes
        if tags:
            yield from memory.take(tags)
        if memory.base.num_changes > num_changes:
            self._forget_former_base()
        if not memory.asleep:
            self.hold = ""
            self._runner.steps.late.is_suspended = False
