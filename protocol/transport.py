"""Carries messages between a replica and its GPUWorker: zmq over ipc, msgpack, two processes, one machine.

The worker answers the client that it received from last, and a client announces itself first. A PAIR socket would not
do: until it has noticed that one client has left, it rejects the next one and loses its messages.

There is at most one message per step in each direction. The client collects requests and sends its next batch when
the worker has acknowledged the last one. The worker acknowledges once per step. The messages are defined in
protocol/messages.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable

import msgspec
import zmq
import zmq.asyncio

from lorafleet.protocol.errors import EngineDead, from_wire
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest
from lorafleet.protocol.messages import (
    AdapterCall,
    AdapterMove,
    AdapterReply,
    ClientBatch,
    DropAdapter,
    EngineHello,
    EngineRequest,
    EngineStats,
    LoadAdapter,
    PinAdapter,
    Sealed,
    StepBatch,
    TokenOutput,
    UnpinAdapter,
)
from lorafleet.protocol.output_stream import OutputStream
from lorafleet.protocol.sealing import seal

HELLO = b""
UNACKNOWLEDGED_S = 10.0  # Longest time that a worker that sends other messages may leave a batch unacknowledged.

log = logging.getLogger(__name__)


class WorkerSocket:
    """The worker's end of the connection. Any thread may call wake(); only the engine loop's thread may call the
    rest."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._client: bytes | None = None  # the client that sent the last message
        self._socket.setsockopt(zmq.LINGER, 1000)  # ms: the message that says why the worker ends must be delivered
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_receiver, zmq.POLLIN)
        self._decoder = msgspec.msgpack.Decoder(ClientBatch)
        self._encoder = msgspec.msgpack.Encoder()

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # full: a wake is pending; closed: no thread waits
            self._wake_sender.send(b"\0")

    def receive(self, wait_ms: int) -> list[ClientBatch]:
        """Returns the batches that have arrived. If there are none, waits up to wait_ms, or until wake()."""
        ready = dict(self._poller.poll(wait_ms))
        if self._wake_receiver.fileno() in ready:
            self._wake_receiver.recv(4096)
        batches: list[ClientBatch] = []
        while True:
            try:
                self._client, message = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return batches
            if message != HELLO:
                batches += self._decoded(message)

    def _decoded(self, message: bytes) -> list[ClientBatch]:
        """Returns the batch, or nothing if the message cannot be read: the client then misses the acknowledgment and
        fails."""
        try:
            return [self._decoder.decode(message)]
        except msgspec.MsgspecError:
            log.exception("a message of %d bytes from the replica cannot be read", len(message))
            return []

    def send(self, batch: StepBatch) -> None:
        """Sends the batch to the client. Drops it if none is connected: then the replica has gone, and its requests
        with it."""
        if self._client is not None:
            self._socket.send_multipart((self._client, self._encoder.encode(batch)), zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close()
        self._context.term()
        self._wake_sender.close()
        self._wake_receiver.close()


class EngineClient:
    """The replica's end of the connection, in its asyncio loop.

    A worker that sends other messages may leave a batch unacknowledged for `unacknowledged_s` seconds.
    """

    def __init__(self, address: str, hello: EngineHello, unacknowledged_s: float = UNACKNOWLEDGED_S) -> None:
        self.hello = hello
        self._unacknowledged_limit_s = unacknowledged_s
        self.stats = EngineStats()
        self._stats_s = time.monotonic()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.set_hwm(0)
        self._socket.connect(address)
        self._socket.send(HELLO)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(StepBatch)
        self._streams: dict[str, OutputStream] = {}
        self.tokens_asked: Counter[str] = Counter()  # prompts and answers, by digest; its reader may clear it
        self._in_flight: Counter[str] = Counter()  # by digest
        self._drained: dict[str, asyncio.Event] = {}
        self._calls: dict[int, asyncio.Future[AdapterInfo | None]] = {}
        self._sequence = 0
        self._next_call = 0
        self._gathering = ClientBatch(0)
        self._unsent: dict[str, Sealed[str]] = {}  # requests of the batch in preparation, by id, in order
        self._unacknowledged = False
        self._sent_s = 0.0  # monotonic, of the last batch
        self._num_late = 0  # messages sent long after that batch that do not acknowledge it
        self._flush_planned = False
        self._dead: EngineDead | None = None
        self._moves_before: list[AdapterMove] = []  # before there was a listener
        self._on_adapter_move: Callable[[AdapterMove], None] = self._moves_before.append
        self._stats_came = asyncio.Event()
        self._receiver = asyncio.get_running_loop().create_task(self._receive())

    @classmethod
    async def connect(
        cls, address: str, hello: EngineHello, unacknowledged_s: float = UNACKNOWLEDGED_S
    ) -> EngineClient:
        return cls(address, hello, unacknowledged_s)

    @property
    def dead(self) -> str | None:
        """The reason why nothing can be generated any more; None while the worker lives."""
        return None if self._dead is None else self._dead.message

    @property
    def num_streams(self) -> int:
        """The number of sequences whose last token has not arrived."""
        return len(self._streams)

    @property
    def num_batches(self) -> int:
        """The number of batches that were sent."""
        return self._sequence

    @property
    def stats_age_s(self) -> float:
        """The time since `stats` arrived. A working worker sends them ten times a second, an idle one at least once a
        second."""
        return time.monotonic() - self._stats_s

    async def next_stats(self) -> EngineStats:
        """Waits for the next stats. Only one caller may wait at a time."""
        self._stats_came.clear()
        await self._stats_came.wait()
        return self.stats

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenOutput, None]:
        """Yields outputs up to the one with a finish_reason. Closing it earlier aborts the sequence within a step.

        Raises the LorafleetError with which the engine rejected the request, or EngineDead.
        """
        self._check_alive()
        sealed = seal(request.request_id, request)
        stream = self._streams[request.request_id] = OutputStream()
        digest = request.lora.digest if request.lora is not None else ""
        self._in_flight[digest] += 1
        num_tokens = len(request.prompt_token_ids)
        self._unsent[request.request_id] = sealed
        self._plan_flush()
        finished = False
        try:
            while not finished:
                output = await stream.get()
                finished = output.finish_reason is not None
                num_tokens += len(output.token_ids)
                yield output
        finally:
            del self._streams[request.request_id]
            if digest:
                self.tokens_asked[digest] += num_tokens
            self._in_flight[digest] -= 1
            if not self._in_flight[digest]:
                del self._in_flight[digest]
                self._drained.pop(digest, asyncio.Event()).set()
            if not finished and not stream.has_failed:
                self._abort(request.request_id)

    async def load_adapter(self, lora: LoRARequest) -> AdapterInfo:
        """Reads and checks the adapter into the worker's CPU tier. Raises AdapterError with the cause."""
        info = await self._call(LoadAdapter(self._call_id(), lora))
        assert info is not None
        return info

    async def drop_adapter(self, digest: str) -> None:
        """Removes the adapter from the worker; a slot in use is freed when its last sequence ends."""
        await self._call(DropAdapter(self._call_id(), digest))

    async def pin_adapter(self, lora: LoRARequest) -> AdapterInfo:
        """Loads the adapter and pins it in a slot. Raises AdapterError."""
        info = await self._call(PinAdapter(self._call_id(), lora))
        assert info is not None
        return info

    async def unpin_adapter(self, digest: str) -> None:
        await self._call(UnpinAdapter(self._call_id(), digest))

    async def drained(self, digest: str) -> None:
        """Waits until no request for the adapter is in flight."""
        while digest in self._in_flight:
            await self._drained.setdefault(digest, asyncio.Event()).wait()

    def listen_to_moves(self, listener: Callable[[AdapterMove], None]) -> None:
        """Passes every adapter move to the listener, beginning with those that ended before this call."""
        for move in self._moves_before:
            listener(move)
        self._moves_before.clear()
        self._on_adapter_move = listener

    async def close(self) -> None:
        self.fail("the engine was closed")
        self._receiver.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._receiver
        self._socket.close()
        self._context.term()

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDead(self._dead.message)

    def _call_id(self) -> int:
        self._next_call += 1
        return self._next_call

    async def _call(self, call: AdapterCall) -> AdapterInfo | None:
        self._check_alive()
        sealed = seal(call.call_id, call)
        reply: asyncio.Future[AdapterInfo | None] = asyncio.get_running_loop().create_future()
        self._calls[call.call_id] = reply
        self._gathering.adapter_calls.append(sealed)
        self._plan_flush()
        try:
            return await reply
        finally:
            self._calls.pop(call.call_id, None)

    def _abort(self, request_id: str) -> None:
        if self._unsent.pop(request_id, None) is None and self._dead is None:
            self._gathering.aborts.append(request_id)
            self._plan_flush()

    def _plan_flush(self) -> None:
        """Schedules a flush at the end of the current loop iteration, so that requests that arrive together travel
        together."""
        if not self._unacknowledged and not self._flush_planned:
            self._flush_planned = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_planned = False
        batch = self._gathering
        if self._dead is not None or not (self._unsent or batch.aborts or batch.adapter_calls):
            return
        try:
            self._send(batch)
        except Exception as error:
            log.exception("a batch cannot be sent to the worker")
            self.fail(f"a batch cannot be sent to the worker: {error!r}")

    def _send(self, batch: ClientBatch) -> None:
        batch.sequence = self._sequence + 1
        batch.requests = list(self._unsent.values())
        message = self._encoder.encode(batch)
        # There is no high-water mark, so the send is queued at once and its future is done.
        self._socket.send(message)
        self._sequence += 1
        self._gathering, self._unsent = ClientBatch(0), {}
        self._unacknowledged, self._sent_s, self._num_late = True, time.monotonic(), 0

    async def _receive(self) -> None:
        """Receives batches until the connection ends. Then it ends every stream and call, so that no caller waits in
        vain."""
        try:
            while self._dead is None:
                self._take_in(self._decoder.decode(await self._socket.recv()))
        except Exception as error:
            log.exception("the connection to the worker ends")
            self.fail(f"a message from the worker cannot be taken in: {error!r}")
        finally:
            self.fail("the connection to the worker has ended")

    def _take_in(self, batch: StepBatch) -> None:
        if batch.stats is not None:
            self.stats, self._stats_s = batch.stats, time.monotonic()
            self._stats_came.set()
        if batch.acknowledged == self._sequence:
            self._unacknowledged = False
            self._flush()
        for output in batch.outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put(output)
        for move in batch.adapter_moves:
            self._on_adapter_move(move)
        for reply in batch.adapter_replies:
            self._answer(reply)
        if batch.fatal is not None:
            self.fail(batch.fatal)
        self._check_acknowledged(batch)

    def _check_acknowledged(self, batch: StepBatch) -> None:
        """Fails if the worker does not acknowledge the last batch in time.

        The worker reads all arrived messages before each step. So the second message that it sends long after a batch
        was sent must acknowledge that batch; the first may end a step that began before.
        """
        self._num_late += self._unacknowledged and batch.sent_s - self._sent_s > self._unacknowledged_limit_s
        if self._num_late >= 2:
            self.fail(f"the worker has not read what it was sent {batch.sent_s - self._sent_s:.0f} s ago")

    def _answer(self, reply: AdapterReply) -> None:
        caller = self._calls.get(reply.call_id)
        if caller is None or caller.done():
            return
        if reply.error is not None:
            caller.set_exception(from_wire(reply.error))
        else:
            caller.set_result(reply.info)

    def fail(self, reason: str) -> None:
        """Ends every stream and call, and all later ones, with EngineDead. Only the first reason counts."""
        if self._dead is not None:
            return
        self._dead = EngineDead(reason)
        for stream in self._streams.values():
            stream.fail(EngineDead(reason))
        for caller in self._calls.values():
            if not caller.done():
                caller.set_exception(EngineDead(reason))


def ipc_address(folder: str) -> str:
    """Returns an address in a private folder. The path of a Unix socket holds 107 bytes at most."""
    path = os.path.join(folder, "engine.sock")
    assert len(path.encode()) <= 107, path
    return f"ipc://{path}"
