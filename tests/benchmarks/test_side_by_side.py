from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import side_by_side
from benchmark_results import Results, read_results

HEAD = b"HTTP/1.1 200 OK\r\nconnection: close\r\n"


class FakeServer:
    """Answers /v1/completions with two tokens in each event, and records the requests."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.authorizations: set[str] = set()
        self.broken_models: set[str] = set()
        self._listening = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[self._serve()])
        self._thread.start()
        assert self._listening.wait(60)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()
        self._loop.close()

    @property
    def measured(self) -> list[dict[str, Any]]:
        return [body for body in self.requests if body["max_tokens"] != side_by_side.WARM_UP_TOKENS]

    async def _serve(self) -> None:
        self._closing = asyncio.Event()
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            self._listening.set()
            await self._closing.wait()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:-2])
        if head.startswith("GET /v1/models "):
            cards = [{"id": "llama"}, *({"id": f"a{i}", "parent": "llama"} for i in (10, 9, 0))]
            body = json.dumps({"data": cards}).encode()
            writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        else:
            body = json.loads(await reader.readexactly(int(fields["content-length"])))
            self.authorizations.add(fields.get("authorization", ""))
            self.requests.append(body)
            answer = b"" if body["model"] in self.broken_models else _events(body["max_tokens"])
            writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(answer) + answer)
        await writer.drain()
        writer.close()


def _events(num_tokens: int) -> bytes:
    texts = [b'data: {"choices": [{"text": "ab"}]}\n\n'] * (num_tokens // 2)
    usage = b'data: {"choices": [], "usage": {"completion_tokens": %d}}\n\ndata: [DONE]\n\n' % num_tokens
    return b": a comment\n\n" + b"".join(texts) + usage


@pytest.fixture
def servers() -> Iterator[tuple[FakeServer, FakeServer]]:
    both = FakeServer(), FakeServer()
    yield both
    for server in both:
        server.close()


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *words: str) -> Results:
    file = tmp_path / "results.json"
    common = ["--prompt", "8", "--generated", "4", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["side_by_side.py", *words, *common])
    side_by_side.main()
    return read_results(file)


def test_every_server_gets_the_same_requests_and_the_first_is_compared_with_the_others(
    servers: tuple[FakeServer, FakeServer],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours, theirs = servers
    results = run(
        monkeypatch,
        tmp_path,
        *(f"ours={ours.url}", f"theirs={theirs.url}/v1", "--streams", "3", "--rates", "200", "--seconds", "0.1"),
        *("--adapters", "0", "2", "--adapter-names", "theirs=b{}", "--requests-per-stream", "2"),
        *("--fields", '{"temperature": 0.5}', "--header", "Authorization: Bearer k"),
    )
    assert ours.authorizations == {"bearer k"}
    assert [body["temperature"] for body in ours.requests] == [0.5] * len(ours.requests)
    prompts = [sorted(body["prompt"] for body in server.measured) for server in servers]
    assert prompts[0] == prompts[1]
    assert len({tuple(prompt) for prompt in prompts[0]}) == len(prompts[0]), "no prompt is repeated"
    counts = [Counter(body["model"] for body in server.measured) for server in servers]
    assert counts[0] == {"llama": 26, "a0": 13, "a9": 13}
    assert counts[1] == {"llama": 26, "b0": 13, "b1": 13}
    assert len(results.cases) == 2 * 2 * 2
    for case in results.cases:
        assert case.figures["failed"] == 0
        assert case.figures["tokens_per_event"] == 2
        assert case.figures["tokens_per_s"] > 0
    assert results.command.startswith("python benchmarks/side_by_side.py ours=http")
    printed = capsys.readouterr().out
    assert printed.count("ours / theirs, ") == 4
    assert "ours / theirs, 3 streams, 2 adapters: tok/s " in printed


def test_results_of_an_earlier_run_are_compared_too(
    servers: tuple[FakeServer, FakeServer],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours, theirs = servers
    load = ("--streams", "2", "--requests-per-stream", "1")
    run(monkeypatch, tmp_path, f"theirs={theirs.url}", *load)
    earlier = (tmp_path / "results.json").rename(tmp_path / "earlier.json")
    run(monkeypatch, tmp_path, f"ours={ours.url}", *load, "--earlier", str(earlier))
    assert "ours / theirs, 2 streams, no adapters: tok/s " in capsys.readouterr().out


def test_a_load_that_fails_is_reported_and_the_others_are_measured(
    servers: tuple[FakeServer, FakeServer],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours, _ = servers
    ours.broken_models = {"a9"}
    words = (f"ours={ours.url}", "--streams", "2", "--adapters", "2", "0", "--requests-per-stream", "1")
    with pytest.raises(SystemExit, match="some requests failed"):
        run(monkeypatch, tmp_path, *words)
    results = read_results(tmp_path / "results.json")
    assert [bool(case.figures["failed"]) for case in results.cases] == [True, False]
    assert "ours, warm-up, failed: 0 tokens in place of 16" in capsys.readouterr().err


def test_too_few_adapters_are_refused_with_the_remedy(
    servers: tuple[FakeServer, FakeServer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=r"lists 3 adapters .* asks for 4.* --adapter-names ours=PATTERN"):
        run(monkeypatch, tmp_path, f"ours={servers[0].url}", "--adapters", "4")


def test_zipf_prefers_the_first_adapters(
    servers: tuple[FakeServer, FakeServer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = (f"ours={servers[0].url}", "--streams", "10", "--adapters", "3", "--popularity", "zipf")
    run(monkeypatch, tmp_path, *words, "--requests-per-stream", "20")
    counts = Counter(body["model"] for body in servers[0].measured)
    assert counts.total() == 200
    assert counts["a0"] > counts["a9"] > counts["a10"] > 0
