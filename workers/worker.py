"""Runs one GPU's process. GPUWorker owns the engine and the loop that drives it. cluster/ makes it a Ray actor.

The loop has a thread of its own and blocks only if there is nothing to compute. An exception in a step ends the
worker, since its state can no longer be trusted. The replica is informed and is replaced.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import EngineDead, LorafleetError, fault_of, to_wire
from lorafleet.protocol.lora_request import AdapterInfo
from lorafleet.protocol.messages import (
    AdapterReply,
    ClientBatch,
    ControlCall,
    DropAdapter,
    EngineHello,
    Id,
    PinInSlot,
    Sealed,
    StepBatch,
    TokenOutput,
    UnpinFromSlot,
)
from lorafleet.protocol.sealing import CALL, REQUEST, unseal
from lorafleet.protocol.transport.addresses import RankAddresses
from lorafleet.protocol.transport.engine_socket import WorkerSocket
from lorafleet.resolvers.neighbor_fetch import FindNeighbors
from lorafleet.workers.engine import Engine
from lorafleet.workers.startup import build_engine
from lorafleet.workers.step_outputs import StepOutputs

log = logging.getLogger(__name__)

IDLE_WAIT_MS = 1000  # if there is nothing to do; a message or a finished load ends the wait
LATE_WORK_WAIT_MS = 5  # if there is only the work that the start has left for idle time; a message ends the wait
COPY_WAIT_MS = 1  # if requests wait for an adapter's copy to the GPU, whose end nobody announces
STATS_PERIOD_S = 0.1


class GPUWorker:
    def __init__(
        self,
        config: EngineConfig,
        address: str,
        ranks: RankAddresses | None = None,
        find_neighbors: FindNeighbors | None = None,
    ) -> None:
        """Loads the model, binds `address` (zmq ipc://…) and starts the loop. Raises ConfigError.

        `ranks` says where the replica's other ranks (workers/follower.py) meet this one. It is None if there are none.
        `find_neighbors` finds other nodes that have an adapter; None asks the adapters' sources only.
        """
        self._socket = WorkerSocket(address)
        try:
            self._engine = build_engine(config, _ProgressLog(), self._socket.wake, ranks, find_neighbors=find_neighbors)
        except BaseException:
            self._socket.close()
            raise
        gc.collect()
        gc.freeze()  # a full collection walks all objects of the model and its graphs: 0.1 s without a step
        self._loop = EngineLoop(self._engine, self._socket, alone=ranks is None)
        self._loop.start()

    def hello(self) -> EngineHello:
        return self._engine.hello

    def check_health(self) -> None:
        """Raises EngineDead if the loop has ended."""
        if self._loop.failure is not None or not self._loop.is_alive():
            raise EngineDead(f"the engine loop has stopped: {self._loop.failure or 'it was shut down'}")

    def shutdown(self) -> None:
        """Ends the loop after the present step. Sequences in flight are lost."""
        self._loop.stop()
        self._loop.join(timeout=30)


class EngineLoop(threading.Thread):
    def __init__(self, engine: Engine, socket: WorkerSocket, *, alone: bool) -> None:
        super().__init__(name="engine-loop", daemon=True)
        self.failure: str | None = None
        self._engine = engine
        self._socket = socket
        self._alone = alone
        self._stopping = False
        self._acknowledged = 0
        self._replies: list[AdapterReply] = []
        self._stats_due_s, self._sent_moves, self._sent_idle = 0.0, 0, True

    def stop(self) -> None:
        self._stopping = True
        self._socket.wake()

    def run(self) -> None:
        try:
            waiting_for_adapters = False
            while not self._stopping:
                waiting_for_adapters = self._run_step(waiting_for_adapters)
        except Exception as e:
            self.failure = self._describe(e)
            log.exception("the engine loop has failed")
            self._socket.send(StepBatch(self._acknowledged, fatal=self.failure))
        finally:
            self._engine.close()
            self._socket.close()

    def _describe(self, error: Exception) -> str:
        """Returns the error's text for the clients whose streams end with it."""
        if self._alone or isinstance(error, LorafleetError):
            return f"{type(error).__name__}: {error}"
        # If a peer is lost, the collectives' messages have addresses and source files, which belong in the log only.
        return f"a step across the replica's ranks failed ({type(error).__name__}). The replica is being replaced."

    def _run_step(self, idle: bool) -> bool:
        """Runs one step, with its input and output. Returns True if nothing could run though requests wait."""
        wait_ms = COPY_WAIT_MS if idle else 0
        if not self._engine.has_work:
            wait_ms = LATE_WORK_WAIT_MS if self._engine.fills_idle_time else IDLE_WAIT_MS
        batches = self._socket.receive(wait_ms)
        rejections = [output for batch in batches for output in self._accept(batch)]
        outputs = self._engine.step(self._socket.has_input)
        outputs.others = rejections + outputs.others
        self._send(outputs, received=bool(batches))
        return self._engine.stalled and not batches

    def _accept(self, batch: ClientBatch) -> list[TokenOutput]:
        """Passes a client's batch to the engine, and returns the rejections."""
        self._acknowledged = batch.sequence
        rejections: list[TokenOutput] = []
        for sealed in batch.requests:
            error = self._rejection(self._add_request, sealed)
            if error is not None:
                rejections.append(TokenOutput(request_id=sealed.id, finish_reason="error", error=to_wire(error)))
        for request_id in batch.aborts:
            self._engine.abort(request_id)
        for call in batch.adapter_calls:
            error = self._rejection(self._handle_call, call)
            if error is not None:
                self._replies.append(AdapterReply(call.id, error=to_wire(error)))
        return rejections

    @staticmethod
    def _rejection(accept: Callable[[Sealed[Id]], None], sealed: Sealed[Id]) -> LorafleetError | None:
        """Returns the error with which the request or call is rejected, or None. A fault of it affects no other."""
        try:
            accept(sealed)
        except LorafleetError as error:
            return error
        except Exception as error:
            log.exception("request %s was rejected because of an internal error", sealed.id)
            return fault_of(error)
        return None

    def _add_request(self, sealed: Sealed[str]) -> None:
        self._engine.add(unseal(sealed, REQUEST))

    def _handle_call(self, sealed: Sealed[int]) -> None:
        call = unseal(sealed, CALL)
        if isinstance(call, ControlCall):
            self._engine.control(call.control).add_done_callback(partial(self._reply, call.call_id))
            return
        if isinstance(call, DropAdapter | UnpinFromSlot):
            if self._engine.loras is not None:
                change = self._engine.loras.drop if isinstance(call, DropAdapter) else self._engine.loras.unpin
                change(call.digest)
            self._replies.append(AdapterReply(call.call_id))
            return
        load = self._engine.pin_adapter if isinstance(call, PinInSlot) else self._engine.load_adapter
        load(call.lora).add_done_callback(partial(self._reply, call.call_id))

    def _reply(self, call_id: int, done: Future[AdapterInfo] | Future[None]) -> None:
        """Answers a call whose future is done. It runs in this thread, since step() resolves the futures."""
        error = done.exception()
        if error is None:
            self._replies.append(AdapterReply(call_id, info=done.result()))
        else:
            known = error if isinstance(error, LorafleetError) else LorafleetError(repr(error))
            self._replies.append(AdapterReply(call_id, error=to_wire(known)))

    def _send(self, outputs: StepOutputs, received: bool) -> None:
        now = time.monotonic()
        moves, is_idle = self._engine.statistics.num_adapter_moves, self._engine.num_unfinished == 0
        became_idle = is_idle and not self._sent_idle
        stats_due = now >= self._stats_due_s or moves != self._sent_moves or became_idle
        if not (outputs or received or self._replies or stats_due):
            return
        batch = StepBatch(self._acknowledged, outputs.others, outputs.plain, self._replies, sent_s=now)
        if stats_due or self._replies:
            batch.stats = self._engine.stats()
            if self._engine.loras is not None:
                batch.adapter_moves = self._engine.loras.take_moves()
            self._stats_due_s, self._sent_moves = now + STATS_PERIOD_S, moves
        self._sent_idle = is_idle
        self._socket.send(batch, lambda: self._stopping)
        self._replies = []


class _ProgressLog:
    """Logs a line for each tenth of the weights. cluster/cli/cli.py draws a bar if there is a terminal."""

    def __init__(self) -> None:
        self._tenths = 0

    def __call__(self, done: int, total: int) -> None:
        if done * 10 // total > self._tenths:
            self._tenths = done * 10 // total
            log.info("loading weights: %d %%", self._tenths * 10)
