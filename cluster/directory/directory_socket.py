"""The socket protocol for the directory's frequent calls, which directory_calls.py declares as SocketCall.

Replicas and routers send them many times a second, or all at once when the directory has been restarted. Each has one
TCP connection with frames of msgpack, on which any number of calls may be in flight. Calls of the actor would cost
Ray's actor twenty times as much (benchmarks/directory_cluster.py). The actor gives the address and a secret to those
that may call it (cluster/directory/directory_actor.py), and a connection must show the secret first.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import secrets
import socket
import zlib
from typing import TypeVar, cast, get_args

import msgspec

from lorafleet.cluster.directory.directory import AdapterDirectory
from lorafleet.cluster.directory.directory_calls import ANSWER_S, AnySocketCall, ReportCall, SocketCall
from lorafleet.cluster.directory.directory_messages import Changes, StaleEpoch
from lorafleet.cluster.directory.residency import Routes
from lorafleet.cluster.task_set import TaskSet
from lorafleet.protocol.framing import FrameCutter, FrameTooLarge, framed

PORTS = range(20_000, 32_000)  # Between the ports of Ray's workers and those that the system assigns.
MAX_CALL_BYTES = 64 << 20  # A full report has 100 bytes for each adapter that the replica holds.
MAX_ANSWER_BYTES = 1 << 30  # A router's whole table has 140 bytes for each adapter.
CONNECT_S = 2.0

MAX_HELLO_BYTES = 256  # Size of a frame on a connection that has not shown the secret.
HELLO_S = 5.0  # Seconds in which a connection must show the secret.
MAX_STRANGERS = 1024  # Connections that have not shown the secret yet; a thousand replicas may connect together.

T = TypeVar("T")
logger = logging.getLogger("lorafleet.cluster")


class Address(msgspec.Struct, frozen=True):
    host: str
    port: int
    secret: str


class _Hello(msgspec.Struct, frozen=True, array_like=True):
    secret: str


class _Request(msgspec.Struct, frozen=True, array_like=True):
    """One call of a connection."""

    number: int
    call: AnySocketCall


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    """The answer to one call."""

    number: int
    result: msgspec.Raw = msgspec.Raw(b"\xc0")  # nil
    stale: str | None = None  # Replaces the result if the call's epoch is over.


class DirectoryServer:
    """Listens from its construction on, and answers after start(). It runs on the directory's event loop.

    `identity` identifies the directory, whichever process it runs in. The next process on the same node gets the same
    address, so that replicas and routers need not ask for it, unless another program has taken the port meanwhile.
    """

    def __init__(
        self, directory: AdapterDirectory, host: str, identity: str, secret: str, hello_s: float = HELLO_S
    ) -> None:
        self.directory = directory
        self.hello_s = hello_s
        self.num_strangers = 0  # Connections that have not shown the secret.
        self._socket = listen(host, identity)
        self.address = Address(host, self._socket.getsockname()[1], secret)
        self._connections: set[_ServerConnection] = set()
        self._encoded: tuple[Routes, msgspec.Raw] | None = None
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _ServerConnection(self, self._connections), sock=self._socket)

    def stop(self) -> None:
        (self._server or self._socket).close()
        for connection in list(self._connections):
            connection.abort()

    def encode(self, answer: Changes | Routes | bool) -> msgspec.Raw:
        """Encodes an answer, but routes only once for all routers at the same version, since these get the same
        object."""
        if not isinstance(answer, Routes):
            return _raw(answer)
        if self._encoded is None or self._encoded[0] is not answer:
            self._encoded = answer, _raw(answer)
        return self._encoded[1]


class _ServerConnection(asyncio.Protocol):
    def __init__(self, server: DirectoryServer, open_connections: set[_ServerConnection]) -> None:
        self._server = server
        self._directory = server.directory
        self._open = open_connections
        self._frames = FrameCutter(MAX_HELLO_BYTES)
        self._known = False
        self._patience: asyncio.TimerHandle | None = None
        self._tasks = TaskSet()
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class does not inherit from it.
        self._open.add(self)
        self._server.num_strangers += 1
        if self._server.num_strangers > MAX_STRANGERS:
            self.abort()
        self._patience = asyncio.get_running_loop().call_later(self._server.hello_s, self.abort)

    def connection_lost(self, _: Exception | None) -> None:
        self._open.discard(self)
        self._is_stranger_no_more()
        self._tasks.cancel()

    def abort(self) -> None:
        self._transport.abort()

    def _is_stranger_no_more(self) -> None:
        """Stops counting the connection as a stranger, since it has shown the secret or is gone."""
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
            self._server.num_strangers -= 1

    def data_received(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        try:
            for frame in self._frames.cut(data):
                self._take(frame)
        except (msgspec.MsgspecError, FrameTooLarge, _UnknownSecret) as error:
            logger.warning("the adapter directory closes a connection: %s", error)
            self.abort()

    def _take(self, frame: bytes) -> None:
        if not self._known:
            shown = _hello_decoder.decode(frame).secret.encode()  # compare_digest needs ASCII text, or bytes.
            self._known = secrets.compare_digest(shown, self._server.address.secret.encode())
            if not self._known:
                raise _UnknownSecret("it sent a wrong secret")
            self._is_stranger_no_more()
            self._frames.max_bytes = MAX_CALL_BYTES
            return
        request = _request_decoder.decode(frame)
        if isinstance(request.call, ReportCall):  # Answered without a task, since there are ten thousand a second.
            self._answer(_Answer(request.number, _raw(self._directory.routers.accept(request.call.report))))
            return
        self._tasks.start(self._serve(request))

    async def _serve(self, request: _Request) -> None:
        try:
            answer = await request.call.answered_by(self._directory)
            self._answer(_Answer(request.number, self._server.encode(answer)))
        except StaleEpoch as stale:
            self._answer(_Answer(request.number, stale=str(stale)))
        except Exception:
            logger.exception("the adapter directory failed to answer %r", request.call)
            self.abort()

    def _answer(self, answer: _Answer) -> None:
        if not self._transport.is_closing():
            self._transport.write(framed(_encoder.encode(answer)))


class DirectoryConnection(asyncio.Protocol):
    """A connection to the directory. Its calls raise StaleEpoch, or ConnectionError if the directory is gone."""

    def __init__(self, answer_s: float) -> None:
        self.closed = False
        self._answer_s = answer_s
        self._frames = FrameCutter(MAX_ANSWER_BYTES)
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[_Answer]] = {}  # By the call's number.
        self._transport: asyncio.Transport

    @classmethod
    async def open(cls, address: Address, answer_s: float = ANSWER_S) -> DirectoryConnection:
        """Connects to the directory, whose silence for `answer_s` seconds ends the connection."""
        connecting = asyncio.get_running_loop().create_connection(lambda: cls(answer_s), address.host, address.port)
        _, connection = await asyncio.wait_for(connecting, CONNECT_S)
        connection._transport.write(framed(_encoder.encode(_Hello(address.secret))))
        return connection

    async def ask(self, call: SocketCall[T]) -> T:
        """Makes a call, beside others that may wait for their answers."""
        if self.closed:
            raise ConnectionResetError("the connection to the adapter directory is closed")
        number = next(self._numbers)
        waiting: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = waiting
        self._transport.write(framed(_encoder.encode(_Request(number, cast(AnySocketCall, call)))))
        try:
            answer = await asyncio.wait_for(waiting, self._answer_s)
        except TimeoutError:
            self.close()
            raise ConnectionAbortedError(f"the adapter directory was silent for {self._answer_s:.0f} s") from None
        finally:
            del self._waiting[number]
        if answer.stale is not None:
            raise StaleEpoch(answer.stale)
        decoder: msgspec.msgpack.Decoder[T] = _decoder_of(type(call))
        return decoder.decode(answer.result)

    def close(self) -> None:
        self.closed = True
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class does not inherit from it.

    def connection_lost(self, _: Exception | None) -> None:
        self.closed = True
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ConnectionResetError("the adapter directory closed the connection"))

    def data_received(self, data: bytes) -> None:
        for frame in self._frames.cut(data):
            answer = _answer_decoder.decode(frame)
            waiting = self._waiting.get(answer.number)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)


def listen(host: str, identity: str) -> socket.socket:
    """Listens at a port of PORTS, always the same for an identity, or at another one if it is taken. `host` is an
    address of IPv4 or IPv6, or a name that has one of IPv4."""
    port = PORTS[zlib.crc32(identity.encode()) % len(PORTS)]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=4096)
    except OSError:
        return socket.create_server((host, 0), family=family, backlog=4096)


class _UnknownSecret(Exception):
    pass


_encoder = msgspec.msgpack.Encoder()
_hello_decoder = msgspec.msgpack.Decoder(_Hello)
_request_decoder = msgspec.msgpack.Decoder(_Request)
_answer_decoder = msgspec.msgpack.Decoder(_Answer)


@functools.cache
def _decoder_of(call: type[SocketCall[T]]) -> msgspec.msgpack.Decoder[T]:
    """Returns the decoder of the type that the call's declaration names in brackets."""
    (answer,) = get_args(vars(call)["__orig_bases__"][0])
    return msgspec.msgpack.Decoder(answer)


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(_encoder.encode(value))
