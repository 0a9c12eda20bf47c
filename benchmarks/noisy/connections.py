"""Attacks with connections to the ingress: slow, idle, half closed, or speaking another protocol than HTTP."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Sequence

from noisy.hostile import Attack, Hostile

NUM_IDLE = 2000
READ_S = 2.0  # The longest time for which the answer to odd bytes is read.


async def slow_headers(hostile: Hostile) -> None:
    """Keeps five hundred connections that send a header line every second."""

    async def slow() -> None:
        async with hostile.connection() as (_, writer):
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n")
            while True:
                writer.write(b"x-more: a\r\n")
                await writer.drain()
                await asyncio.sleep(1)

    await hostile.repeated(slow, 500)


async def slow_bodies(hostile: Hostile) -> None:
    """Keeps five hundred requests whose bodies arrive one byte per second."""
    head = hostile.head("POST", "/v1/completions", "content-length: 100000")

    async def slow() -> None:
        async with hostile.connection() as (_, writer):
            writer.write(head + b'{"model": "m", "prompt": "')
            while True:
                writer.write(b"a")
                await writer.drain()
                await asyncio.sleep(1)

    await hostile.repeated(slow, 500)


async def idle_connections(hostile: Hostile) -> None:
    """Keeps two thousand connections on which nothing is sent."""

    async def idle() -> None:
        async with hostile.connection():
            await asyncio.sleep(3600)

    await hostile.repeated(idle, NUM_IDLE)


async def kept_connections(hostile: Hostile) -> None:
    """Keeps a thousand connections open after one request each."""

    async def keep() -> None:
        async with hostile.connection() as (reader, writer):
            writer.write(hostile.head("GET", "/v1/models"))
            await writer.drain()
            await reader.read(1)
            await asyncio.sleep(3600)

    await hostile.repeated(keep, 1000)


async def new_connections(hostile: Hostile) -> None:
    """Opens and closes connections as fast as possible."""

    async def once() -> None:
        async with hostile.connection():
            pass

    await hostile.repeated(once, 64)


async def half_closed(hostile: Hostile) -> None:
    """Sends requests whose clients close their side before the answer, and never read it."""
    request = hostile.written(hostile.completion(stream=True, max_tokens=400))

    async def once() -> None:
        async with hostile.connection() as (_, writer):
            writer.write(request)
            writer.write_eof()
            await asyncio.sleep(1)

    await hostile.repeated(once, 100)


async def garbage(hostile: Hostile) -> None:
    """Sends random bytes, and random bytes after a valid request on the same connection."""
    draw, good = random.Random(0), hostile.head("GET", "/health")
    await _exchanged(hostile, lambda: (good if draw.random() < 0.5 else b"") + draw.randbytes(8192))


async def pipelining(hostile: Hostile) -> None:
    """Sends a hundred requests on a connection at once, without waiting for an answer."""
    requests = hostile.head("GET", "/v1/models") * 100
    await _exchanged(hostile, lambda: requests)


async def tls_on_the_plain_port(hostile: Hostile) -> None:
    """Starts TLS handshakes on a port that does not speak TLS."""
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(500)
    await _exchanged(hostile, lambda: hello, width=32)


async def smuggling(hostile: Hostile) -> None:
    """Sends requests whose lengths contradict one another, with a second request hidden in the first."""
    hidden = hostile.head("DELETE", "/v1/adapters/pirate", "content-length: 0")
    heads = [
        ("content-length: 5", "transfer-encoding: chunked"),
        ("transfer-encoding: chunked", "transfer-encoding: identity"),
        ("transfer-encoding: xchunked",),
        ("content-length: 5", "content-length: 6"),
        ("content-length: +5",),
        ("content-length: 0x5",),
        ("transfer-encoding : chunked",),
    ]
    await _exchanged_any(
        hostile, [hostile.head("POST", "/v1/completions", *head) + b"0\r\n\r\n" + hidden for head in heads]
    )


async def odd_chunks(hostile: Hostile) -> None:
    """Sends bodies of one-byte chunks, with long extensions, endless lengths and trailers."""
    head = hostile.head("POST", "/v1/completions", "transfer-encoding: chunked")
    bodies = [b"1\r\na\r\n" * 20_000, b"1;" + b"x" * 8_000 + b"\r\na\r\n", b"f" * 5_000, b"0\r\n" + b"t: a\r\n" * 1_000]
    await _exchanged_any(hostile, [head + body for body in bodies])


async def large_heads(hostile: Hostile) -> None:
    """Sends heads of a thousand lines, of lines of 60 kB, and paths of 30 kB."""
    heads = [
        hostile.head("GET", "/v1/models", *(f"x-{i}: a" for i in range(1000))),
        hostile.head("GET", "/v1/models", "x-long: " + "a" * 60_000),
        hostile.head("GET", "/v1/models/" + "a" * 30_000),
        hostile.head("GET", "/v1/adapters?" + "&".join(f"a{i}=b" for i in range(1_500))),
    ]
    await _exchanged_any(hostile, heads)


async def upgrades(hostile: Hostile) -> None:
    """Requests upgrades to WebSocket or HTTP/2, CONNECT and TRACE, and announces bodies that are never sent."""
    heads = [
        hostile.head("GET", "/v1/completions", "upgrade: websocket", "connection: upgrade", "sec-websocket-key: a"),
        hostile.head("GET", "/", "connection: upgrade, http2-settings", "upgrade: h2c", "http2-settings: AAMAAABk"),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        hostile.head("CONNECT", "127.0.0.1:22"),
        hostile.head("TRACE", "/v1/models"),
        hostile.head("POST", "/v1/completions", "expect: 100-continue", "content-length: 1000"),
    ]
    await _exchanged_any(hostile, heads)


async def _exchanged_any(hostile: Hostile, requests: Sequence[bytes]) -> None:
    """Sends one of the requests, drawn at random, on each new connection."""
    draw = random.Random(0)
    await _exchanged(hostile, lambda: draw.choice(requests))


async def _exchanged(hostile: Hostile, make: Callable[[], bytes], width: int = 16) -> None:
    """Opens `width` connections at a time, over and over. Sends on each what `make` returns, and reads the answer."""

    async def once() -> None:
        async with hostile.connection() as (reader, writer):
            writer.write(make())
            await writer.drain()
            async with asyncio.timeout(READ_S):
                while await reader.read(1 << 16):
                    pass

    await hostile.repeated(once, width)


ATTACKS: tuple[Attack, ...] = (
    *(slow_headers, slow_bodies, idle_connections, kept_connections, new_connections, half_closed, garbage),
    *(pipelining, tls_on_the_plain_port, smuggling, odd_chunks, large_heads, upgrades),
)
