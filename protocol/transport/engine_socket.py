"""Carries messages between a replica and its GPUWorker: zmq over ipc, msgpack, two processes, one machine.

The worker answers the client that it received from last, and a client announces itself first. A PAIR socket would not
do: until it has noticed that one client has left, it rejects the next one and loses its messages.

There is at most one message per step in each direction: batch_sender.py gathers what the client sends. The messages
are defined in protocol/messages.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import msgspec
import zmq
import zmq.asyncio

from lorafleet.protocol.engine_control import EngineControl
from lorafleet.protocol.errors import EngineDead, from_wire
from lorafleet.protocol.lora_request import AdapterInfo, LoRARequest
from lorafleet.protocol.messages import (
    AdapterMove,
    AdapterReply,
    ClientBatch,
    ControlCall,
    DropAdapter,
    EngineCall,
    EngineHello,
    EngineRequest,
    EngineStats,
    LoadAdapter,
    PinInSlot,
    StepBatch,
    UnpinFromSlot,
)
from lorafleet.protocol.sealing import seal
from lorafleet.protocol.transport.batch_sender import BatchSender
from lorafleet.protocol.transport.output_stream import OutputStream, SequenceOutputs
from lorafleet.protocol.transport.requests_in_flight import RequestsInFlight
from lorafleet.protocol.transport.unread_outputs import IsStalled, never_stalled

HELLO = b""
# Messages of steps that wait on each side of the connection. A worker that finds both full waits, since the front is
# behind by about 10 s: every answer goes through it.
MAX_STEPS_WAITING = 512
FULL_WAIT_S = 0.005  # Time between two attempts to send a step to a front that is behind.
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
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # Otherwise a message that finds the queue full is lost.
        self._socket.setsockopt(zmq.SNDHWM, MAX_STEPS_WAITING)
        self._socket.setsockopt(zmq.RCVHWM, 0)
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

    def has_input(self) -> bool:
        """Returns whether receive() would return at once."""
        return bool(self._poller.poll(0))

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

    def send(self, batch: StepBatch, is_stopping: Callable[[], bool] = lambda: False) -> None:
        """Sends the batch to the client. Waits while the client is far behind, unless the worker is stopping. Drops
        the batch if no client is connected: then the replica has gone, and its requests with it."""
        if self._client is None:
            return
        message = self._encoder.encode(batch)
        while True:
            try:
                self._socket.send_multipart((self._client, message), zmq.NOBLOCK)
            except zmq.Again:
                if is_stopping():
                    return
                time.sleep(FULL_WAIT_S)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                return
            else:
                return

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
        self.stats = EngineStats()
        self._stats_s = time.monotonic()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, MAX_STEPS_WAITING)
        self._socket.connect(address)
        self._socket.send(HELLO)
        # There is no high-water mark for what is sent, so a message is queued at once and the send's future is done.
        self._sender = BatchSender(self._socket.send, self.fail, unacknowledged_s)
        self._decoder = msgspec.msgpack.Decoder(StepBatch)
        self._in_flight = RequestsInFlight()
        self._calls: dict[int, asyncio.Future[AdapterInfo | None]] = {}
        self._next_call = 0
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
        return len(self._in_flight.streams)

    @property
    def num_batches(self) -> int:
        """The number of batches that were sent."""
        return self._sender.num_sent

    @property
    def tokens_asked(self) -> Counter[str]:
        """Tokens of the prompts and answers that have ended, by digest. Its reader may clear it."""
        return self._in_flight.tokens_asked

    @property
    def adapter_names(self) -> list[tuple[str, str]]:
        """The names of adapters that were requested or loaded, and the digest of the version that each had last."""
        return self._in_flight.names.items()

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

    def generate(self, request: EngineRequest, is_stalled: IsStalled = never_stalled) -> SequenceOutputs:
        """Returns an iterator over the outputs of the sequence.

        Closing it early aborts the sequence. So do too many outputs that wait while `is_stalled` says that their stream
        waits for its client.
        """
        return SequenceOutputs(request, partial(self._start, is_stalled), self._end)

    def _start(self, is_stalled: IsStalled, request: EngineRequest) -> OutputStream:
        self._check_alive()
        sealed = seal(request.request_id, request)
        stream = self._in_flight.open(request, partial(self._sender.abort, request.request_id), is_stalled)
        self._sender.add_request(sealed)
        return stream

    def _end(self, request: EngineRequest, num_tokens: int, aborts: bool) -> None:
        self._in_flight.close(request, num_tokens)
        if aborts:
            self._sender.abort(request.request_id)

    async def load_adapter(self, lora: LoRARequest) -> AdapterInfo:
        """Reads and checks the adapter into the worker's CPU tier. Raises AdapterError with the cause."""
        info = await self._call(LoadAdapter(self._call_id(), lora))
        assert info is not None
        self._in_flight.names.put(lora.lora_name, info.digest)
        return info

    async def drop_adapter(self, digest: str) -> None:
        """Removes the adapter from the worker; a slot in use is freed when its last sequence ends."""
        await self._call(DropAdapter(self._call_id(), digest))

    async def pin_adapter(self, lora: LoRARequest) -> AdapterInfo:
        """Loads the adapter and pins it in a slot. Raises AdapterError."""
        info = await self._call(PinInSlot(self._call_id(), lora))
        assert info is not None
        self._in_flight.names.put(lora.lora_name, info.digest)
        return info

    async def unpin_adapter(self, digest: str) -> None:
        await self._call(UnpinFromSlot(self._call_id(), digest))

    async def control(self, control: EngineControl) -> None:
        """Carries out an order that concerns all requests. Returns when it is done, see engine_control.py."""
        await self._call(ControlCall(self._call_id(), control))

    async def drained(self, digest: str) -> None:
        """Waits until no request for the adapter is in flight."""
        await self._in_flight.drained(digest)

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

    async def _call(self, call: EngineCall) -> AdapterInfo | None:
        self._check_alive()
        sealed = seal(call.call_id, call)
        reply: asyncio.Future[AdapterInfo | None] = asyncio.get_running_loop().create_future()
        self._calls[call.call_id] = reply
        self._sender.add_call(sealed)
        try:
            return await reply
        finally:
            self._calls.pop(call.call_id, None)

    async def _receive(self) -> None:
        """Receives batches until the connection ends. Then it ends every stream and call, so that no caller waits in
        vain."""
        try:
            while self._dead is None:
                self._take_in(self._decoder.decode(await self._socket.recv()))
        except Exception as error:
            log.exception("the connection to the worker failed")
            self.fail(f"a message from the worker cannot be processed: {error!r}")
        finally:
            self.fail("the connection to the worker has ended")

    def _take_in(self, batch: StepBatch) -> None:
        if batch.stats is not None:
            self.stats, self._stats_s = batch.stats, time.monotonic()
            self._stats_came.set()
        self._sender.acknowledge(batch.acknowledged)
        streams = self._in_flight.streams
        for request_id, token in zip(batch.plain.request_ids, batch.plain.token_ids, strict=True):
            stream = streams.get(request_id)
            if stream is not None:
                stream.put_token(request_id, token)
        for output in batch.outputs:
            stream = streams.get(output.request_id)
            if stream is not None:
                stream.put(output)
        for move in batch.adapter_moves:
            self._on_adapter_move(move)
        for reply in batch.adapter_replies:
            self._answer(reply)
        if batch.fatal is not None:
            self.fail(batch.fatal)
        self._sender.check_acknowledged(batch.sent_s)

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
        self._sender.stop()
        self._in_flight.fail(reason)
        for caller in self._calls.values():
            if not caller.done():
                caller.set_exception(EngineDead(reason))


def ipc_address(folder: str) -> str:
    """Returns an address in a private folder. The path of a Unix socket holds 107 bytes at most."""
    path = os.path.join(folder, "engine.sock")
    assert len(path.encode()) <= 107, path
    return f"ipc://{path}"
