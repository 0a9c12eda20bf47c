"""Administration of a running server over HTTP and by the command line: two replicas, streams running meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from peft import PeftConfig
from peft.utils import load_peft_weights
from typer.testing import CliRunner

from lorafleet.cluster.cli.cli import app
from lorafleet.protocol.adapter_formats.adapter_files import folder_digest
from tests.cluster.harness import ADMIN_KEY, SharedServer

pytestmark = pytest.mark.xdist_group("shared_server")
PROMPT = [40, 41, 42, 43, 44, 45]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def http(shared_server: SharedServer) -> httpx.Client:
    """ref0, ref1 and ref2 say what the adapters answer."""
    return shared_server.http


@pytest.fixture(scope="module")
def answers(http: httpx.Client) -> list[list[int]]:
    found = [ask(http, f"ref{i}") for i in range(3)]
    assert len({tuple(one) for one in found}) == 3
    return found


def body(model: str, **fields: Any) -> dict[str, Any]:
    asked = {"model": model, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}
    return asked | {"ignore_eos": True, "return_token_ids": True} | fields


def ask(http: httpx.Client, model: str, **fields: Any) -> list[int]:
    response = http.post("/v1/completions", json=body(model, **fields))
    assert response.status_code == 200, response.text
    tokens: list[int] = response.json()["choices"][0]["token_ids"]
    return tokens


def push(http: httpx.Client, tiny_model: Path, name: str, adapter: int, **fields: Any) -> dict[str, Any]:
    source = str(tiny_model.parent / f"a{adapter}")
    response = http.post("/v1/adapters", json={"name": name, "source": source, **fields})
    assert response.status_code == 200, response.text
    shown: dict[str, Any] = response.json()
    return shown


def error_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["message"]


def cli(http: httpx.Client, *arguments: str) -> Any:
    options = ["--url", str(http.base_url), "--admin-key", ADMIN_KEY, "-o", "json"]
    done = CliRunner().invoke(app, ["adapters", *arguments, *options])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)  # The file server writes to this process's stderr too.


def test_without_the_key_nothing_is_told_or_done(http: httpx.Client) -> None:
    with httpx.Client(base_url=http.base_url) as stranger:
        for given, words in (
            ({}, "did not provide the admin key"),
            ({"authorization": "Bearer another key"}, "Incorrect admin key"),
        ):
            for method, path in (("GET", ""), ("POST", ""), ("DELETE", "/ref0"), ("POST", "/ref0/pin")):
                response = stranger.request(method, f"/v1/adapters{path}", headers=given)
                assert response.status_code == 401, path
                error = response.json()["error"]
                assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
                assert words in error["message"]
                assert response.headers["www-authenticate"] == "Bearer"


def test_the_command_line_pushes_a_folder_moves_rolls_back_and_removes(
    http: httpx.Client, tiny_model: Path, answers: list[list[int]], shared_server: SharedServer, tmp_path: Path
) -> None:
    for number in (0, 1):
        shown = cli(http, "push", "org/tool", str(tiny_model.parent / f"a{number}"), "--replicas", "2")
        assert [one["number"] for one in shown["versions"]] == list(range(1, number + 2))
        assert ask(http, "org/tool") == answers[number]
    assert cli(http, "rollback", "org/tool")["aliases"]["org/tool"]["split"] == {"1": 1.0}
    assert ask(http, "org/tool") == answers[0]
    cli(http, "alias", "org/tool", "2", "--alias", "tool-next")
    assert ask(http, "tool-next") == answers[1]
    assert cli(http, "verify", "org/tool")["verified"] == [1, 2]
    assert cli(http, "pin", "org/tool", "--replicas", "2")["pinned_replicas"] == 2
    assert cli(http, "unpin", "org/tool")["pinned_replicas"] == 0
    assert len(cli(http, "prefetch", "org/tool", "--replicas", "2")["replicas"]) == 2
    assert "org/tool" in [one["id"] for one in cli(http, "list")["data"]]
    digests = {one["digest"] for one in cli(http, "show", "org/tool")["versions"]}
    got = cli(http, "download", "org/tool", "--to", str(tmp_path / "tool"))
    assert got["version"] == 1 and folder_digest(tmp_path / "tool") == got["digest"]
    assert PeftConfig.from_pretrained(tmp_path / "tool").peft_type and load_peft_weights(str(tmp_path / "tool"), "cpu")
    again = cli(http, "push", "org/tool", str(tmp_path / "tool"))
    assert {one["digest"] for one in again["versions"]} == digests, "the same bytes are no new version"
    [stored] = (shared_server.state_dir / "catalogues").glob("*/adapters")
    assert digests <= set(os.listdir(stored))
    assert cli(http, "remove", "org/tool")["removed"]
    assert digests.isdisjoint(os.listdir(stored))
    for name in ("org/tool", "tool-next"):
        assert http.post("/v1/completions", json=body(name)).status_code == 404
    assert http.get("/v1/adapters/org/tool").status_code == 404


@pytest.mark.parametrize(("name", "adapter"), [("cold", "a2"), ("distant", "a1"), ("ref0", "a0")])
def test_an_adapter_that_the_catalogue_has_no_files_of_is_downloaded_from_where_it_is(
    http: httpx.Client, tiny_model: Path, tmp_path: Path, name: str, adapter: str
) -> None:
    got = cli(http, "download", name, "--to", str(tmp_path / name))
    assert got["digest"] == folder_digest(tmp_path / name) == folder_digest(tiny_model.parent / adapter)


def test_an_unknown_adapter_is_not_downloaded(http: httpx.Client, tmp_path: Path) -> None:
    options = ["--to", str(tmp_path / "x"), "--url", str(http.base_url), "--admin-key", ADMIN_KEY]
    done = CliRunner().invoke(app, ["adapters", "download", "nobody", *options])
    assert done.exit_code == 1 and "404: " in done.output and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("method", "path", "sent", "status", "words"),
    [
        ("POST", "", {"name": "x"}, 400, "`source` is missing"),
        ("POST", "", {"name": "../x", "source": "/x"}, 400, "path part"),
        ("POST", "", {"name": "base", "source": "/x"}, 400, "base model's own"),
        ("POST", "", {"name": "x", "source": "/nowhere"}, 404, "/nowhere"),
        ("POST", "/ref0/alias", {"version": 7}, 400, "has no version 7; it has 1"),
        ("POST", "/ref0/alias", {"split": {"1": 0}}, 400, "`split.1` is 0; it must be in (0.0, 1000000.0]"),
        ("POST", "/ref0/alias", {"split": {"01": 1}}, 400, "write it as '1'"),
        ("POST", "/ref0/alias", {"version": 1, "alias": "ref1"}, 400, "'ref1' is an alias of adapter 'ref1'"),
        ("POST", "/ref0/rollback", {}, 400, "nothing to roll back to"),
        ("POST", "/ref0/pin", {"replicas": 9}, 400, "replicas is 9; this cluster has 2"),
        ("POST", "/nobody/pin", {}, 404, "no adapter `nobody`"),
        ("DELETE", "/nobody", None, 404, "no adapter `nobody`"),
        ("GET", "?limit=0", None, 400, "`limit` is 0; it must be in [1, 1000]"),
    ],
)
def test_errors_name_value_bound_and_remedy(
    http: httpx.Client, method: str, path: str, sent: object, status: int, words: str
) -> None:
    found, message = error_of(http.request(method, f"/v1/adapters{path}", json=sent))
    assert found == status, message
    assert words in message


async def test_every_answer_is_one_versions_while_new_ones_are_pushed_under_load(
    http: httpx.Client, tiny_model: Path, answers: list[list[int]]
) -> None:
    await asyncio.to_thread(push, http, tiny_model, "hot", 0, replicas=2)
    wrong: list[str] = []
    stopped = asyncio.Event()
    pushed: list[tuple[float, int]] = [(0.0, 0)]  # when each push had returned, of which adapter
    begun: list[tuple[float, int]] = [(0.0, 0)]

    async def stream(client: httpx.AsyncClient) -> None:
        while not stopped.is_set():
            started = time.monotonic()
            done = [adapter for at_s, adapter in pushed if at_s <= started][-1]
            response = await client.post("/v1/completions", json=body("hot"))
            tokens = response.json()["choices"][0]["token_ids"] if response.status_code == 200 else response.text
            possible = [done, *(adapter for at_s, adapter in begun if at_s >= started or adapter == begun[-1][1])]
            if tokens not in [answers[adapter] for adapter in possible]:
                wrong.append(f"{tokens} of {possible}")

    async with httpx.AsyncClient(base_url=http.base_url, timeout=120) as client:
        clients = [asyncio.create_task(stream(client)) for _ in range(8)]
        for adapter in (1, 2, 0, 2):
            await asyncio.sleep(0.5)
            begun.append((time.monotonic(), adapter))
            await asyncio.to_thread(push, http, tiny_model, "hot", adapter)
            pushed.append((time.monotonic(), adapter))
            after = await client.post("/v1/completions", json=body("hot"))
            assert after.json()["choices"][0]["token_ids"] == answers[adapter]
        stopped.set()
        await asyncio.gather(*clients)
    assert wrong == []


def test_a_split_gives_each_version_its_share_and_one_request_id_always_the_same(
    http: httpx.Client, tiny_model: Path, answers: list[list[int]]
) -> None:
    for adapter in (0, 1):
        push(http, tiny_model, "canary", adapter)
    split = http.post("/v1/adapters/canary/alias", json={"split": {"1": 3, "2": 1}})
    assert split.status_code == 200, split.text
    first = [ask(http, "canary", request_id=f"request {i}", max_tokens=4) for i in range(80)]
    again = [ask(http, "canary", request_id=f"request {i}", max_tokens=4) for i in range(80)]
    assert first == again
    assert {tuple(one) for one in first} == {tuple(answers[i][:4]) for i in (0, 1)}
    assert 8 <= sum(one == answers[1][:4] for one in first) <= 33  # of 80, a quarter: 20, five deviations either way


async def test_a_canary_gets_its_share_of_openais_clients_until_it_is_everything(
    http: httpx.Client, tiny_model: Path, answers: list[list[int]]
) -> None:
    for adapter in (0, 1):
        push(http, tiny_model, "rollout", adapter, replicas=2, activate=adapter == 0)

    async def asked(count: int) -> list[int]:
        """Answers by each version."""
        url = f"{str(http.base_url).rstrip('/')}/v1"
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
            busy = asyncio.Semaphore(16)

            async def ask_once() -> list[int]:
                async with busy:
                    answer: Any = await client.completions.create(
                        model="rollout",
                        prompt=PROMPT,
                        max_tokens=4,
                        temperature=0,
                        extra_body={"ignore_eos": True, "return_token_ids": True},
                    )
                    tokens: list[int] = answer.choices[0].token_ids
                    return tokens

            given = await asyncio.gather(*(ask_once() for _ in range(count)))
        found = [sum(one == answers[i][:4] for one in given) for i in (0, 1)]
        assert sum(found) == count, "every answer is one version's"
        return found

    def move(verb: str = "alias", **body: object) -> None:
        response = http.post(f"/v1/adapters/rollout/{verb}", json=body)
        assert response.status_code == 200, response.text

    assert await asked(40) == [40, 0]
    move(split={"1": 9, "2": 1})
    _, canary = await asked(400)
    assert 16 <= canary <= 64  # of a binomial distribution 40, four deviations of 6 either way
    move(split={"1": 1, "2": 1})
    _, canary = await asked(400)
    assert 160 <= canary <= 240  # 200, four deviations of 10
    move(version=2)
    assert await asked(40) == [0, 40]
    move("rollback")
    old, canary = await asked(60)
    assert old and canary, "the split again"


def test_a_directory_killed_at_any_moment_loses_nothing_that_was_acknowledged(
    http: httpx.Client, tiny_model: Path, answers: list[list[int]], shared_server: SharedServer
) -> None:
    for delay_s in (0.0, 0.05, 0.3):
        push(http, tiny_model, "kept", 0)
        [directory] = shared_server.running.processes("DirectoryActor")
        time.sleep(delay_s)
        os.kill(directory, signal.SIGKILL)
        killed = time.monotonic()
        while time.monotonic() < killed + 2.0:
            assert ask(http, "kept") == answers[0]  # resident: nobody notices
        shown = http.get("/v1/adapters/kept")
        assert shown.status_code == 200, shown.text
        assert shown.json()["aliases"]["kept"]["split"] == {"1": 1.0}
    push(http, tiny_model, "kept", 1)
    assert ask(http, "kept") == answers[1]


def test_removal_waits_for_a_stream_in_flight_which_ends_well(
    http: httpx.Client, tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "leaving"  # other bytes than ref1's, which stays
    shutil.copytree(tiny_model.parent / "a1", folder)
    with (folder / "adapter_config.json").open("a") as config:
        config.write("\n")
    pushed = http.post("/v1/adapters", json={"name": "leaving", "source": str(folder), "replicas": 2})
    assert pushed.status_code == 200, pushed.text
    with http.stream("POST", "/v1/completions", json=body("leaving", stream=True, max_tokens=800)) as stream:
        lines = stream.iter_lines()
        next(lines)
        status, message = error_of(http.delete("/v1/adapters/leaving", params={"wait_s": "0.5"}))
        assert status == 503 and "requests for it are still running" in message
        assert http.post("/v1/completions", json=body("leaving")).status_code == 404
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "error" not in chunks[-1]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    deadline = time.monotonic() + 120
    while http.get("/v1/adapters/leaving").status_code != 404:
        assert time.monotonic() < deadline
        time.sleep(0.1)
