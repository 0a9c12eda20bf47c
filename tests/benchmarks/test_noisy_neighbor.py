from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from noisy import report
from noisy.attacks import ALL, BY_AREA, chosen
from noisy.hostile import Hostile, Target, description_of, name_of, run
from noisy.quiet import Answer, QuietTenant
from noisy.report import ALL_AT_ONCE, Round, Times
from noisy.watch import Seen, Watch, role_of
from noisy.world import DEMO

WAIT_S = 120.0
END_OF_HEAD = b"\r\n\r\n"


async def until(condition: Callable[[], bool]) -> None:
    """Raises TimeoutError."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110  # neither an attack nor the quiet tenant has an event for it
            await asyncio.sleep(0.01)


def test_there_are_many_attacks_each_with_a_name_of_its_own_and_a_sentence_about_it() -> None:
    assert len(ALL) == sum(len(attacks) for attacks in BY_AREA.values()) >= 40
    for name, attack in ALL.items():
        assert name_of(attack) == name
        assert description_of(attack).endswith(".") and "\n" not in description_of(attack), name


def test_attacks_are_chosen_by_name_and_by_area_and_a_name_that_is_none_is_refused() -> None:
    assert chosen(["logit-bias", "uploads"]) == [ALL["logit-bias"], *BY_AREA["uploads"]]
    assert chosen([]) == list(ALL.values())
    with pytest.raises(SystemExit, match="no attack 'nothing'"):
        chosen(["nothing"])


@asynccontextmanager
async def refusing_server() -> AsyncIterator[int]:
    """A port where every request is answered with a 400 before its body is read."""
    transports: set[asyncio.Transport] = set()

    class Refusing(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            self._transport, self._end = transport, b""
            transports.add(transport)

        def data_received(self, data: bytes) -> None:
            seen, self._end = self._end + data, (self._end + data)[-len(END_OF_HEAD) :]
            if END_OF_HEAD in seen and not self._transport.is_closing():
                self._transport.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
                self._transport.close()

        def connection_lost(self, _error: Exception | None) -> None:
            transports.discard(self._transport)

    server = await asyncio.get_running_loop().create_server(Refusing, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
        # A connection that was accepted just now gets its transport in a later turn of the loop. If the server is
        # closed before, asyncio leaves its socket open.
        await asyncio.sleep(0.01)
        server.close()
        while transports:  # Those whose client has gone without a word may not have noticed it yet.
            for transport in transports:
                transport.abort()
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("turns", range(6))
async def test_a_refusing_server_closes_what_it_has_just_accepted(turns: int) -> None:
    """The loop runs so many times before the server is told to end. What is left open fails the test when it is
    collected."""
    async with refusing_server() as port:
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(66)]
        for _ in range(turns):
            await asyncio.sleep(0)
        for client in clients:
            client.close()
    gc.collect()


def target(port: int) -> Target:
    adapter = DEMO / "adapters" / "shout"
    return Target(
        *("127.0.0.1", port, os.getpid(), "lf-key", "demo", "pirate", adapter, DEMO / "model", Path("/none"), 1536, 512)
    )


@pytest.mark.parametrize("area", [area for area in BY_AREA if area != "processes"])
async def test_each_attack_of_an_area_sends_something_and_ends_when_it_is_told_to(area: str) -> None:
    async with refusing_server() as port:
        for attack in BY_AREA[area]:
            # Each has a client of its own: connections of an attack that was ended hold places in the pool.
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S) as http:
                hostile = Hostile(target(port), http)
                attacking = asyncio.create_task(attack(hostile))
                await until(lambda: hostile.seen.total() > 0 or attacking.done())  # noqa: B023  # awaited here
                attacking.cancel()
                await asyncio.wait([attacking])
            assert attacking.cancelled(), name_of(attack)
            assert "PoolTimeout" not in hostile.seen, name_of(attack)


async def test_attacks_end_when_their_time_is_over() -> None:
    async with refusing_server() as port:
        seen = await run([ALL["unknown-models"], ALL["idle-connections"]], target(port), seconds=0.5)
    assert seen.keys() == {"unknown-models", "idle-connections"}


QUESTION = ("pirate", "What?")


@asynccontextmanager
async def answering_server(*words: str, pause_s: float = 0.0) -> AsyncIterator[str]:
    """Its whole answers say "Arr, matey"; its streams say the words, after a pause each."""
    whole = json.dumps({"choices": [{"message": {"content": "Arr, matey"}}]}).encode()
    events = [b"data: " + json.dumps({"choices": [{"delta": {"content": word}}]}).encode() + b"\n\n" for word in words]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        body = json.loads(await reader.readexactly(size))
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
        for part in events if body.get("stream") else [whole]:
            await asyncio.sleep(pause_s)
            writer.write(part)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def asked(url: str) -> Sequence[Answer]:
    async with aclosing(QuietTenant(url, "lf-key", [QUESTION], interval_s=60)) as quiet:
        await quiet.learn()
        async with quiet.asking() as answers:
            await until(lambda: bool(answers))
        return answers


async def test_the_quiet_tenant_times_first_tokens_and_gaps() -> None:
    async with answering_server("Arr, ", "matey", pause_s=0.2) as url:
        answers = await asked(url)
    [answer] = answers
    assert (answer.status, answer.fault, len(answer.gaps_s)) == (200, None, 1)
    assert answer.ttft_s is not None and answer.ttft_s >= 0.2
    assert answer.ttft_s + sum(answer.gaps_s) >= 0.4


async def test_the_quiet_tenant_notices_a_wrong_answer() -> None:
    async with answering_server("Arr, ", "MATEY") as url:
        answers = await asked(url)
    assert "'Arr, MATEY' in place of 'Arr, matey'" in str(answers[0].fault)


async def test_the_quiet_tenant_notices_that_nobody_answers() -> None:
    async with answering_server("Arr, ", "matey") as url:
        quiet = QuietTenant(url, "lf-key", [QUESTION], interval_s=60)
        await quiet.learn()
    async with aclosing(quiet), quiet.asking() as answers:
        await until(lambda: bool(answers))
    assert answers[0].status == 0
    assert "ConnectError" in str(answers[0].fault)


GOOD = Answer(0.0, 200, 0.1, [0.01, 0.02])


def round_of(*answers: Answer, seen: Seen | None = None, name: str = "logit-bias") -> Round:
    return Round.of(name, answers, seen or Seen(), {"200": 3})


def test_a_round_within_all_bounds_is_kept() -> None:
    one = round_of(GOOD, GOOD, seen=Seen(grown_mib={"EngineReplica 1": 299.0}))
    assert one.broken == []
    assert one.ttft.worst == pytest.approx(100)
    assert one.gaps.p50 == pytest.approx(15)
    assert report.row(one).endswith("| EngineReplica +299 MiB | 0 % | yes |")
    assert "All bounds" in report.summary([one, one])


@pytest.mark.parametrize(
    ("answers", "seen", "words"),
    [
        ([replace(GOOD, ttft_s=2.1)], Seen(), "worst TTFT 2100 ms"),
        ([Answer(0.0, 503, fault="503: no replica")], Seen(), "1 x 503: no replica"),
        ([Answer(0.0, fault="TimeoutError after 30.0 s")], Seen(), "TimeoutError"),
        ([GOOD], Seen(lost=["WorkerActor 7"]), "lost WorkerActor 7"),
        ([GOOD], Seen(grown_mib={"haproxy 1": 1.0, "EngineReplica 2": 301.0}), "EngineReplica 2 grew by 301 MiB"),
        ([], Seen(), "nothing was asked"),
    ],
)
def test_a_broken_bound_is_named(answers: list[Answer], seen: Seen, words: str) -> None:
    one = round_of(GOOD, *answers, seen=seen) if answers else round_of(seen=seen)
    assert any(words in reason for reason in one.broken)
    assert report.row(one).endswith("| NO |")
    assert words in report.summary([one])


def test_all_attacks_at_once_have_the_same_bounds() -> None:
    late = replace(GOOD, ttft_s=9.0)
    assert round_of(late, name=ALL_AT_ONCE).broken
    assert round_of(replace(GOOD, fault="503: no replica"), name=ALL_AT_ONCE).broken


def test_figures_of_a_round_can_be_written_as_json() -> None:
    written = json.loads(json.dumps(round_of(GOOD).as_json()))
    assert written["name"] == "logit-bias" and written["ttft"]["worst"] == pytest.approx(100)


def test_times_of_nothing_are_not_numbers() -> None:
    assert str(Times.of([]).worst) == "nan"


async def test_the_watch_notices_a_process_that_grows_and_one_that_ends() -> None:
    grows = "print(flush=True); input(); data = bytearray(b'x') * (64 << 20); print(len(data), flush=True); input()"
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec("python", "-c", grows, "DirectoryActor", stdin=pipe, stdout=pipe)
    assert child.stdin is not None and child.stdout is not None
    await child.stdout.readline()
    watch = Watch(os.getpid())
    child.stdin.write(b"\n")
    await child.stdout.readline()
    watch.sample()
    assert watch.seen().grown_mib[f"DirectoryActor {child.pid}"] > 50
    child.stdin.write(b"\n")
    await child.wait()
    assert watch.seen().lost == [f"DirectoryActor {child.pid}"]


def test_processes_are_known_by_their_roles_and_others_by_their_programs() -> None:
    assert role_of(["ray::ServeReplica:lorafleet:EngineReplica"]) == "EngineReplica"
    assert role_of(["/usr/bin/python", "-I", "/a/template_program.py"]) == "template_program.py"
