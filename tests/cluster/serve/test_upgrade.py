"""An application that is deployed again from a file answers meanwhile: with another option, if it cannot be built, and
if its replicas do not start.

This is the last file of shared_server's, whose replicas have other processes and another option afterwards.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.conftest import SharedServer
from tests.cluster.haproxies import wait_until

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


async def deploy_under_load(server: SharedServer, *changes: str) -> tuple[str, list[tuple[str, str]]]:
    """Deploys a file with these changes. Returns why that failed, if it did, and the names and answers of closed loops
    that began before the change and ended after it."""
    async with httpx.AsyncClient(base_url=server.running.url, timeout=300, trust_env=False) as http:
        answers = [(name, await ask(http, name, 32)) for name in NAMES]
        words = [str(PROGRAM), str(server.running.pid), "replace", *changes]
        change = await asyncio.create_subprocess_exec(sys.executable, *words, stderr=asyncio.subprocess.PIPE)
        deployed = asyncio.create_task(change.communicate())
        long = [asyncio.create_task(ask(http, name, 300)) for name in NAMES]

        async def loop(name: str) -> None:
            while not deployed.done():
                answers.append((name, await ask(http, name, 32)))

        await asyncio.gather(deployed, *long, *map(loop, NAMES))
        answers += [(name, await ask(http, name, 32)) for name in NAMES]
    return "" if change.returncode == 0 else deployed.result()[1].decode(), answers


def workers(server: SharedServer) -> set[int]:
    return set(server.running.processes("WorkerActor"))


def base(server: SharedServer) -> dict[str, Any]:
    found: dict[str, Any] = server.http.get("/v1/models").json()["data"][0]
    return found


def assert_right(answers: list[tuple[str, str]]) -> None:
    assert len(answers) > 3 * len(NAMES)
    assert len(set(answers)) == len(NAMES), "each adapter has one answer"
    assert len({text for _, text in answers}) > 1, "the adapters can be told apart"


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ("max_modle_len=400", "unknown argument 'max_modle_len'; did you mean 'max_model_len'?"),
        ("model=/no/such/model", "model '/no/such/model' is not a folder"),
    ],
)
def test_a_file_that_cannot_be_deployed_leaves_everything_as_it_is(
    shared_server: SharedServer, change: str, cause: str
) -> None:
    before = workers(shared_server)
    failed, answers = asyncio.run(deploy_under_load(shared_server, change))
    assert "Serve could not deploy the application" in failed and cause in failed
    assert_right(answers)
    wait_until(lambda: workers(shared_server) == before)
    assert len(before) == 2


def test_no_answer_is_lost_or_changed_while_replicas_with_another_option_take_over(shared_server: SharedServer) -> None:
    before = workers(shared_server)
    assert len(before) == 2 and base(shared_server)["max_model_len"] != CHANGED_LEN
    changes = (
        f"model={base(shared_server)['root']}",
        f"max_model_len={CHANGED_LEN}",
    )  # The last file had another model.
    failed, answers = asyncio.run(deploy_under_load(shared_server, *changes))
    assert not failed
    assert_right(answers)
    assert base(shared_server)["max_model_len"] == CHANGED_LEN
    wait_until(lambda: not before & workers(shared_server))
