"""Attacks by clients that read slowly or not at all, on every route that writes much."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from noisy.hostile import Attack, Call, Hostile, post
from noisy.stored import uploaded_file

NUM_CLIENTS = 24
STAYS_S = 4.0  # Time after which some clients leave without having read anything.
SIP_BYTES = 4096


async def clients_that_never_read(hostile: Hostile) -> None:
    """Opens streams of many samples with log-probabilities, not a byte of which is read."""
    await _ignored(hostile, _streams(hostile), stays_s=3600)


async def clients_that_read_nothing_and_leave(hostile: Hostile) -> None:
    """Opens such streams on all routes, and leaves after four seconds without having read a byte."""
    await _ignored(hostile, _streams(hostile), stays_s=STAYS_S)


async def clients_that_sip(hostile: Hostile) -> None:
    """Reads four kilobytes of such streams each second."""
    requests = [hostile.written(call) for call in _streams(hostile)]

    async def sip() -> None:
        async with hostile.connection() as (reader, writer):
            writer.transport.pause_reading()  # type: ignore[attr-defined]  # Every socket transport has this method.
            writer.write(random.choice(requests))
            await writer.drain()
            while not reader.at_eof():
                writer.transport.resume_reading()  # type: ignore[attr-defined]
                await reader.read(SIP_BYTES)
                writer.transport.pause_reading()  # type: ignore[attr-defined]
                await asyncio.sleep(1)

    await hostile.repeated(sip, NUM_CLIENTS)


async def downloads_that_nobody_reads(hostile: Hostile) -> None:
    """Requests the content of files and adapters, and reads nothing of it."""
    file = await uploaded_file(hostile, b'{"a": "' + b"x" * (8 << 20) + b'"}\n')
    calls = [Call("GET", path) for path in (f"/v1/files/{file}/content", "/metrics", "/v1/models")]
    await _ignored(hostile, [*calls, post(f"/v1/adapters/{hostile.model}/download", {})], stays_s=STAYS_S)


def _streams(hostile: Hostile) -> list[Call]:
    chat = {"logprobs": True, "top_logprobs": 20, "n": 32, "temperature": 1.0, "stream": True, "max_tokens": 400}
    sampling = {"max_new_tokens": 400, "ignore_eos": True, "n": 16}
    generated = {"model": hostile.model, "text": "Count", "sampling_params": sampling, "stream": True}
    response = {"model": hostile.model, "input": "Count", "max_output_tokens": 400, "stream": True, "top_logprobs": 20}
    return [
        hostile.completion(stream=True, n=32, logprobs=20, max_tokens=400, temperature=1.0),
        hostile.completion(stream=True, prompt=[[5 + i, 7] for i in range(64)], logprobs=20, max_tokens=200),
        hostile.chat(**chat),
        post("/generate", generated | {"return_logprob": True, "top_logprobs_num": 20}),
        post("/v1/responses", response | {"include": ["message.output_text.logprobs"]}),
        post("/v1/responses", response | {"include": ["message.output_text.logprobs"], "background": True}),
    ]


async def _ignored(hostile: Hostile, calls: Sequence[Call], stays_s: float) -> None:
    """Sends these requests on bare connections of which nothing is read, and leaves after this time."""
    requests = [hostile.written(call) for call in calls]

    async def ignore() -> None:
        async with hostile.connection() as (_, writer):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(random.choice(requests))
            await writer.drain()
            await asyncio.sleep(stays_s)
            writer.transport.abort()

    await hostile.repeated(ignore, NUM_CLIENTS)


ATTACKS: tuple[Attack, ...] = (
    *(clients_that_never_read, clients_that_read_nothing_and_leave, clients_that_sip, downloads_that_nobody_reads),
)
