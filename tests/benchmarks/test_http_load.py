from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import http_load
from http_load import Call, Job, Report, ReportLost, run, run_apart, write_whole

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def token(text: str) -> bytes:
    return b'data: {"choices": [{"text": "' + text.encode() + b'"}], "usage": null}\n\n'


def ending(num_tokens: int) -> bytes:
    return b'data: {"choices": [], "usage": {"completion_tokens": %d}}\n\ndata: [DONE]\n\n' % num_tokens


def chunked(body: bytes) -> bytes:
    return b"%x\r\n" % len(body) + body + b"\r\n"


@asynccontextmanager
async def server(answer: Answer) -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await answer(writer)
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


async def measured(answer: Answer, *calls: Call) -> Report:
    async with server(answer) as url:
        return await run(Job(url, list(calls)))


async def test_each_event_with_text_is_timed_however_the_bytes_are_cut() -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        first, second = chunked(token("a")), chunked(token("b")[:20]) + chunked(token("b")[20:] + ending(2))
        writer.write(HEAD + first)
        await writer.drain()
        await asyncio.sleep(0.1)
        for byte in second:
            writer.write(bytes([byte]))
            await writer.drain()
        writer.write(chunked(b"")[:-2] + b"\r\n")

    report = await measured(answer, Call(0.2, "m", [5, 6], 2))
    (outcome,) = report.outcomes
    assert (outcome.error, outcome.num_tokens, len(outcome.chunks_s)) == (None, 2, 2)
    assert 0.2 <= outcome.sent_s <= outcome.chunks_s[0]
    assert outcome.chunks_s[1] - outcome.chunks_s[0] == pytest.approx(0.1, abs=0.05)


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nfull", "503: full"),
        (HEAD + chunked(token("a") + ending(1)) + b"0\r\n\r\n", "1 tokens in place of 2"),
        (HEAD + chunked(b'data: {"error": {"message": "no room"}}\n\ndata: [DONE]\n\n'), "no room"),
        (HEAD + chunked(token("a")), "connection lost: None"),
        (b"nonsense\r\n\r\n", "cannot be read"),
    ],
)
async def test_an_answer_that_is_not_whole_is_a_failure_that_says_why(raw: bytes, error: str) -> None:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(raw)

    (outcome,) = (await measured(answer, Call(0.0, "m", [5], 2))).outcomes
    assert error in (outcome.error or "")


async def test_no_server_is_a_failure() -> None:
    (outcome,) = (await run(Job("http://127.0.0.1:1", [Call(0.0, "m", [5], 2)]))).outcomes
    assert "no connection" in (outcome.error or "")


async def test_a_stream_of_a_closed_loop_waits_for_its_last_answer() -> None:
    running, most = 0, 0

    async def answer(writer: asyncio.StreamWriter) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        writer.write(HEAD + chunked(token("a") + ending(1)) + b"0\r\n\r\n")

    async with server(answer) as url:
        report = await run(Job(url, [Call(0.0, "m", [5], 1) for _ in range(7)], streams=3))
        late = await run(Job(url, [Call(0.0, "m", [5], 1) for _ in range(7)], streams=3, seconds=0.0))
    assert [outcome.error for outcome in report.outcomes] == [None] * 7
    assert most == 3
    assert late.outcomes == [], "the time is over before the first call"


def test_a_report_is_written_whole_although_signals_cut_writes() -> None:
    """A pipe holds 64 KiB, so the writer waits for the reader, and a signal ends the write before all is written."""
    source, target = os.pipe()
    content = os.urandom(1 << 20)
    received = bytearray()

    def read() -> None:
        while part := os.read(source, 1 << 15):
            received.extend(part)
            time.sleep(2e-3)

    reader = threading.Thread(target=read)
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    reader.start()
    signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)
    try:
        write_whole(target, content)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        os.close(target)
    reader.join()
    os.close(source)
    assert received == content


def test_a_process_that_ends_without_a_report_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "half.py"
    program.write_text("import sys; sys.stdin.read(); print('{', end=''); sys.exit(3)")
    monkeypatch.setattr(http_load, "__file__", str(program))
    with pytest.raises(ReportLost, match="status 3 and 1 bytes"):
        run_apart(Job("http://127.0.0.1:1", []))
