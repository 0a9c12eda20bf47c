"""Runs a rank other than 0. It does what rank 0 orders, in that order, and decides nothing.

Its thread is the counterpart of rank 0's engine loop. An exception ends the rank: it reports to rank 0, and the
replica is replaced.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future

import torch

from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import EngineDead, LorafleetError, to_wire
from lorafleet.protocol.transport.addresses import RankAddresses
from lorafleet.resolvers.neighbor_fetch import FindNeighbors
from lorafleet.workers.rank_startup import build_rank
from lorafleet.workers.slots.loader import AdapterLoader
from lorafleet.workers.slots.model_manager import LoRAModelManager
from lorafleet.workers.slots.packed_adapter import PackedAdapter
from lorafleet.workers.tp.link import RankSocket
from lorafleet.workers.tp.rank_messages import (
    AwaitBlocks,
    BlockOrder,
    CaptureGraphs,
    EmptySlot,
    FillSlot,
    ForgetShard,
    LoadBlocks,
    LoadShard,
    MemoryMoved,
    MemoryOrder,
    Order,
    RankFailed,
    ReadBlocks,
    ReleaseMemory,
    RunDraftStep,
    RunStep,
    SaveBlocks,
    ShardLoaded,
    ShareTokens,
    Stop,
    TakeMemory,
    WriteBlocks,
)
from lorafleet.workers.tp.shared_unread import share_unread

log = logging.getLogger(__name__)

WAIT_MS = 200  # how soon a stop from outside is noticed


class RankWorker:
    """The process of one GPU of a replica, except the first. Raises ConfigError, as GPUWorker does."""

    def __init__(
        self,
        config: EngineConfig,
        rank: int,
        addresses: RankAddresses,
        find_neighbors: FindNeighbors | None = None,
    ) -> None:
        """Joins the group and loads its part of the model. Returns when rank 0 has done so too.

        `find_neighbors` finds other nodes that have an adapter; None asks the adapters' sources only.
        """
        self._loop = FollowerLoop(config, rank, addresses, find_neighbors)
        self._loop.start()

    def check_health(self) -> None:
        """Raises EngineDead if the loop has ended."""
        if not self._loop.is_alive():
            raise EngineDead(f"rank {self._loop.rank} has stopped: {self._loop.failure or 'it was shut down'}")

    def wait(self) -> None:
        """Waits until rank 0 has ordered the rank to stop, or it fails."""
        self._loop.join()

    def shutdown(self) -> None:
        self._loop.stop()
        self._loop.join(timeout=30)


class FollowerLoop(threading.Thread):
    def __init__(
        self, config: EngineConfig, rank: int, addresses: RankAddresses, find_neighbors: FindNeighbors | None
    ) -> None:
        super().__init__(name="follower-loop", daemon=True)
        self.rank = rank
        self.failure: str | None = None
        self._stopping = False
        self._socket = RankSocket(addresses, rank)
        try:
            built = build_rank(config, rank, addresses, find_neighbors=find_neighbors)
        except BaseException as e:
            self._socket.answer(RankFailed(rank, e.message if isinstance(e, LorafleetError) else repr(e)))
            self._socket.close()
            raise
        self._steps = built.steps
        self._draft_steps = built.draft_steps
        self._memory = built.memory
        self._block_size = config.block_size
        self._tiers = built.tiers
        self._adapters = None if built.slots is None or built.loader is None else _Shards(built.slots, built.loader)

    def stop(self) -> None:
        self._stopping = True

    def run(self) -> None:
        try:
            while not self._stopping:
                order = self._socket.receive(WAIT_MS)
                if isinstance(order, Stop):
                    break
                if order is not None:
                    self._execute(order)
        except Exception as e:
            self.failure = f"{type(e).__name__}: {e}"
            log.exception("rank %d has failed", self.rank)
            self._socket.answer(RankFailed(self.rank, self.failure))
        finally:
            if self._adapters is not None:
                self._adapters.close()
            self._memory.close()
            for tiers in self._tiers.values():
                tiers.close()
            self._socket.close()
            if self.failure is None:
                self._memory.close_steps()
                self._steps.model.group.leave()

    def _execute(self, order: Order) -> None:
        if isinstance(order, RunStep):
            if self._adapters is not None:
                self._adapters.await_slots(order.generations)
            self._run(order)
            if order.shares_tokens:
                self._steps.share(len(order.sent.sampling))
            return
        if isinstance(order, ShareTokens):
            self._steps.share(order.num_rows)
            return
        if isinstance(order, RunDraftStep):
            assert self._draft_steps is not None, "these orders come only where a head drafts"
            self._draft_steps.run_ordered(order)
            return
        if isinstance(order, MemoryOrder):
            self._move_memory(order)
            return
        if isinstance(order, BlockOrder):
            self._move_blocks(order)
            return
        assert self._adapters is not None, "orders about adapters come only where LoRA is on"
        match order:
            case LoadShard():
                self._load(order)
            case FillSlot():
                self._adapters.fill(order)
            case EmptySlot():
                self._adapters.empty(order.slot)
            case ForgetShard():
                self._adapters.forget(order.digest)

    def _run(self, order: RunStep) -> None:
        unread = None
        if order.unread is not None:
            unread, _ = share_unread(self._steps.model.group, order.unread, self._steps.device)
        self._steps.run(order.sent.plan(self._block_size), unread=unread)

    def _move_memory(self, order: MemoryOrder) -> None:
        error = None
        try:
            match order:
                case ReleaseMemory(tags, level):
                    self._memory.release(tags, level)
                case TakeMemory(tags):
                    self._memory.take(tags)
                case CaptureGraphs():
                    self._memory.capture()
        except LorafleetError as raised:
            error = to_wire(raised)
        self._socket.answer(MemoryMoved(self.rank, self._memory.digest, error))

    def _move_blocks(self, order: BlockOrder) -> None:
        tiers = self._tiers[order.content]
        match order:
            case SaveBlocks(_, pairs):
                tiers.save(pairs)
            case LoadBlocks(_, load_id, pairs):
                tiers.load(load_id, pairs)
            case AwaitBlocks(_, load_id):
                tiers.await_load(load_id)
            case WriteBlocks(_, job_id, pairs):
                tiers.write(job_id, pairs, self._socket.answer)
            case ReadBlocks(_, job_id, pairs):
                tiers.read(job_id, pairs, self._socket.answer)

    def _load(self, order: LoadShard) -> None:
        assert self._adapters is not None
        adapters, socket, rank = self._adapters, self._socket, self.rank

        def answer(done: Future[PackedAdapter]) -> None:  # in the loader's thread
            error = done.exception()
            if error is None:
                adapters.keep(done.result())
                socket.answer(ShardLoaded(rank, order.load_id, digest=done.result().info.digest))
            else:
                assert isinstance(error, LorafleetError), error  # the loader raises no others
                socket.answer(ShardLoaded(rank, order.load_id, error=to_wire(error)))

        adapters.loader.submit(order.lora).add_done_callback(answer)


class _Shards:
    """This rank's parts of adapters: those in slots, and those in host memory as long as rank 0 has its own there."""

    def __init__(self, slots: LoRAModelManager, loader: AdapterLoader) -> None:
        self.loader = loader
        self._slots = slots
        self._in_host: dict[str, PackedAdapter] = {}

    def keep(self, adapter: PackedAdapter) -> None:
        """Stores an adapter in host memory. A loader's thread calls it before it answers rank 0, which orders to fill
        a slot with the adapter only after that answer."""
        self._in_host[adapter.info.digest] = adapter

    def forget(self, digest: str) -> None:
        self._in_host.pop(digest, None)

    def fill(self, order: FillSlot) -> None:
        slot = self._slots.slots[order.slot]
        # Rank 0 fills a slot that nobody uses any more, but steps that used it may still be queued here.
        self._slots.mark_quiet(slot)
        self._slots.activate(self._in_host[order.digest], slot, extents=order.extents)
        assert slot.generation == order.generation, (slot, order)

    def empty(self, index: int) -> None:
        slot = self._slots.slots[index]
        self._slots.mark_quiet(slot)  # as in fill()
        self._slots.deactivate(slot)

    def await_slots(self, generations: list[tuple[int, int]]) -> None:
        """Makes the current stream wait for the copies into these slots, which the next step reads."""
        for index, generation in generations:
            slot = self._slots.slots[index]
            assert slot.generation == generation and slot.digest is not None, (slot, generation)
            if slot.ready is not None and not slot.is_ready:
                torch.cuda.current_stream().wait_event(slot.ready)

    def close(self) -> None:
        self.loader.stop()
        self._slots.wait_for_copies()
        self.loader.free()
