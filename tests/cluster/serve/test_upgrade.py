"""An application that is deployed with another option replaces its replicas one by one, and answers meanwhile.

This is the last file of shared_server's, whose replicas have other processes and another option afterwards.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import httpx
import pytest

from tests.cluster.conftest import SharedServer

pytestmark = pytest.mark.xdist_group("shared_server")
PROGRAM = Path(__file__).parents[3] / "benchmarks" / "change_application.py"
NAMES = ("ref0", "ref1", "ref2")
CHANGED_LEN = 500


async def ask(http: httpx.AsyncClient, name: str, num_tokens: int) -> str:
    """Returns the text of a stream that came to its end."""
    body = {"model": name, "prompt": "hello", "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        lines = [line async for line in answer.aiter_lines() if line]
    assert answer.status_code == 200, lines
    assert lines[-1] == "data: [DONE]", lines[-1]
    choices = [choice for line in lines[:-1] for choice in json.loads(line.removeprefix("data: "))["choices"]]
    assert choices[-1]["finish_reason"] == "length", choices[-1]
    return "".join(choice["text"] for choice in choices)


async def replace_under_load(server: SharedServer) -> list[tuple[str, str]]:
    """Returns the names and answers of closed loops that began before the change and ended after it."""
    async with httpx.AsyncClient(base_url=server.running.url, timeout=300, trust_env=False) as http:
        answers = [(name, await ask(http, name, 32)) for name in NAMES]
        words = [PROGRAM, str(server.running.pid), "replace", f"max_model_len={CHANGED_LEN}"]
        change = await asyncio.create_subprocess_exec(sys.executable, *words)
        replaced = asyncio.create_task(change.wait())
        long = [asyncio.create_task(ask(http, name, 300)) for name in NAMES]

        async def loop(name: str) -> None:
            while not replaced.done():
                answers.append((name, await ask(http, name, 32)))

        await asyncio.gather(replaced, *long, *map(loop, NAMES))
        answers += [(name, await ask(http, name, 32)) for name in NAMES]
    assert change.returncode == 0
    return answers


def test_no_answer_is_lost_or_changed_while_replicas_with_another_option_take_over(shared_server: SharedServer) -> None:
    def model_len() -> int:
        found: int = shared_server.http.get("/v1/models").json()["data"][0]["max_model_len"]
        return found

    workers = set(shared_server.running.processes("WorkerActor"))
    assert len(workers) == 2 and model_len() != CHANGED_LEN
    answers = asyncio.run(replace_under_load(shared_server))
    assert len(answers) > 3 * len(NAMES)
    assert len(set(answers)) == len(NAMES), "each adapter has one answer"
    assert len({text for _, text in answers}) > 1, "the adapters can be told apart"
    assert model_len() == CHANGED_LEN
    assert not workers & set(shared_server.running.processes("WorkerActor")), "no replica is of before"
