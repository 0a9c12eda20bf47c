"""Gives the GPU memory of all ranks of a replica back, and takes it again. It is rank 0's part.

The work takes seconds, so it runs in a thread, while the engine loop goes on to take in requests and to report that it
lives. Each method is a generator that the loop advances once a step, until it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from lorafleet.protocol.engine_control import MemoryTag, SleepLevel
from lorafleet.protocol.errors import LorafleetError, from_wire
from lorafleet.workers.base_identity import BaseIdentity
from lorafleet.workers.bases.weights_digest import digest_of_ranks
from lorafleet.workers.sleep.rank_memory import RankMemory
from lorafleet.workers.tp.link import OtherRanks
from lorafleet.workers.tp.rank_messages import CaptureGraphs, MemoryOrder, ReleaseMemory, TakeMemory


class ReplicaMemory:
    """The memory of all ranks. No step may be queued while a generator runs.

    Args:
        base: Says which weights the ranks hold.
        others: The other ranks, or None if there are none.
        wake: Called from other threads when a generator can be advanced.
    """

    def __init__(
        self, own: RankMemory, base: BaseIdentity, others: OtherRanks | None, wake: Callable[[], None]
    ) -> None:
        self.base = base
        self.asleep: frozenset[MemoryTag] = frozenset()  # The parts that have been given back, on all ranks.
        self._own = own
        self._others = others
        self._wake = wake
        self._level: SleepLevel = 1
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="sleep")

    @property
    def reloads(self) -> bool:
        """Whether the weights can be read from the checkpoint again."""
        return self._own.reloads

    def release(self, tags: Collection[MemoryTag], level: SleepLevel) -> Generator[None]:
        """Gives these parts back. Raises the first error."""
        if "weights" in tags:
            self._level = level
        self.asleep |= frozenset(tags)
        order = ReleaseMemory(sorted(tags), level)
        errors, _ = yield from self._on_all(order, partial(self._own.release, tags, level))
        if errors:
            raise errors[0]

    def take(self, tags: Collection[MemoryTag]) -> Generator[None]:
        """Takes these parts again. Raises the first error, and gives them back if there was one.

        Behind it, `base` says which weights the ranks hold now."""
        errors, digest = yield from self._on_all(TakeMemory(sorted(tags)), partial(self._own.take, tags))
        if errors:
            yield from self.release(tags, self._level)
            raise errors[0]
        self.asleep -= frozenset(tags)
        if "weights" in tags:
            self.base.become(digest)
        if self.asleep:
            return
        errors, _ = yield from self._on_all(CaptureGraphs(), self._own.capture)
        assert not errors, "a rank that fails here ends the replica"

    def close_steps(self) -> None:
        """Ends rank 0's steps for good, see RankMemory."""
        self._own.close_steps()

    def close(self) -> None:
        self._pool.shutdown()
        self._own.close()

    def _on_all(
        self, order: MemoryOrder, work: Callable[[], None]
    ) -> Generator[None, None, tuple[list[LorafleetError], str]]:
        """Has all ranks carry out an order. Returns the errors of those that could not, and the digest of the weights
        that the ranks hold. Raises EngineDead if a rank is gone."""
        errors: list[LorafleetError] = []
        digests: dict[int, str] = {}
        num_missing = 0
        if self._others is not None:
            self._others.send(order)
            num_missing = len(self._others.ranks)
        job = self._pool.submit(work)
        job.add_done_callback(lambda _: self._wake())
        while not job.done() or num_missing:
            yield
            for moved in [] if self._others is None else self._others.memory_moved():
                num_missing -= 1
                digests[moved.rank] = moved.digest
                if moved.error is not None:
                    errors.append(from_wire(moved.error))
        error = job.exception()
        if isinstance(error, LorafleetError):
            errors.insert(0, error)
        elif error is not None:
            raise error
        digests[0] = self._own.digest
        return errors, digest_of_ranks(digests[rank] for rank in sorted(digests))
