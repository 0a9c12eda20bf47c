"""The whole application, as `lorafleet serve` starts it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import httpx
import psutil
import pytest

from living import command, family
from lorafleet.cluster.config import parse_args
from lorafleet.cluster.serve import local
from tests.cluster.answers import answer, check_body_limit, logprobs, seen_logprobs
from tests.cluster.harness import (
    START_S,
    SharedServer,
    free_port,
    start_server,
    stop_server,
    wait_until_printed,
)
from tests.cluster.sockets import listening_ports

pytestmark = pytest.mark.xdist_group("shared_server")


@pytest.fixture(scope="module")
def client(shared_server: SharedServer) -> httpx.Client:
    return shared_server.http


def test_what_serves_has_the_priority_that_the_server_was_started_with(shared_server: SharedServer) -> None:
    pids = [pid for title in ("ray::", "haproxy") for pid in shared_server.running.processes(title)]
    priorities = {os.getpriority(os.PRIO_PROCESS, pid) for pid in pids}
    assert priorities == {os.getpriority(os.PRIO_PROCESS, shared_server.running.pid)}


def test_what_the_server_writes_is_its_users_alone(shared_server: SharedServer) -> None:
    """The server was started with the umask 0, so that what its processes and libraries write is checked as well."""
    assert logprobs(shared_server.http, "distant"), "it is fetched into the cache"
    pids = [pid for title in ("ray::", "haproxy") for pid in shared_server.running.processes(title)]
    [run_dir] = {found for pid in pids if (found := psutil.Process(pid).environ().get("LORAFLEET_RUN_DIR"))}
    roots = [shared_server.state_dir, shared_server.state_dir.parent / "cache", Path(run_dir)]
    found = [path for root in roots for path in (root, *root.rglob("*")) if not path.is_symlink()]
    assert len(found) > 30
    assert [str(path) for path in found if path.stat().st_mode & 0o077] == []


def test_adapters_answer_differently_from_the_base(client: httpx.Client) -> None:
    assert logprobs(client, "base") != logprobs(client, "ref0")


def test_health_version_and_metrics(client: httpx.Client) -> None:
    assert client.get("/health").status_code == 200
    assert client.get("/version").json()["version"]
    assert logprobs(client, "base")
    text = client.get("/metrics").text
    assert "vllm:num_requests_running{" in text and "lorafleet_scrape_complete 1" in text
    assert "\nlorafleet_directory_adapters " in text


def test_an_unknown_model_is_a_404(client: httpx.Client) -> None:
    response = answer(client, "nobody")
    assert (response.status_code, response.json()["error"]["param"]) == (404, "model")


def test_a_resolved_adapter_is_served_when_first_asked_for(client: httpx.Client) -> None:
    assert logprobs(client, "cold") not in (logprobs(client, "base"), logprobs(client, "ref0"))


def test_loading_replacing_and_unloading_reach_every_replica_before_they_return(
    client: httpx.Client, tiny_model: Path
) -> None:
    def everywhere(model: str) -> set[object]:
        with ThreadPoolExecutor(8) as pool:
            responses = list(pool.map(lambda _: answer(client, model), range(16)))
        return {str(seen_logprobs(r)) if r.status_code == 200 else r.status_code for r in responses}

    def change(action: str, **body: object) -> None:
        response = client.post(f"/v1/{action}_lora_adapter", json={"lora_name": "loaded-at-run-time", **body})
        assert response.status_code == 200, response.text

    change("load", lora_path=str(tiny_model.parent / "a0"))
    first = everywhere("loaded-at-run-time")
    assert len(first) == 1 and 404 not in first
    change("load", lora_path=str(tiny_model.parent / "a1"), load_inplace=True)
    second = everywhere("loaded-at-run-time")
    assert len(second) == 1 and second != first
    change("unload")
    assert everywhere("loaded-at-run-time") == {404}
    assert "loaded-at-run-time" not in client.get("/v1/models").text


def test_a_body_over_the_proxys_buffer_is_answered(client: httpx.Client) -> None:
    response = client.post("/v1/completions", json={"prompt": "x" * (7 << 20), "model": "ref0"})
    assert response.status_code == 400 and "token" in response.text, response.text[:300]


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_over_the_limit_is_413_through_the_proxy(client: httpx.Client, declared: bool) -> None:
    check_body_limit(client, declared)


def test_a_dead_worker_is_replaced(client: httpx.Client, shared_server: SharedServer) -> None:
    workers = shared_server.running.processes("WorkerActor")
    assert len(workers) == 2
    before = logprobs(client, "ref0")
    os.kill(workers[0], signal.SIGKILL)
    deadline = time.monotonic() + START_S
    while len(set(shared_server.running.processes("WorkerActor")) - {workers[0]}) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert logprobs(client, "ref0") == before


@pytest.mark.parametrize("title", ["ray::DashboardAgent", "ray::RuntimeEnvAgent"])
def test_an_agent_of_rays_that_dies_is_started_again_on_its_ports_and_takes_nothing_with_it(
    client: httpx.Client, shared_server: SharedServer, title: str
) -> None:
    raylet = shared_server.running.processes("raylet/raylet")
    [agent] = shared_server.running.processes(title)
    ports = sorted(listening_ports(psutil.Process(agent)))
    os.kill(agent, signal.SIGKILL)
    deadline = time.monotonic() + START_S
    while not any(sorted(listening_ports(one)) == ports for one in started_after(shared_server, title, agent)):
        assert time.monotonic() < deadline
        assert client.get("/health").status_code == 200
        time.sleep(0.1)
    assert shared_server.running.processes("raylet/raylet") == raylet, "which would have ended with all that serves"
    assert answer(client, "ref0").status_code == 200


def started_after(server: SharedServer, title: str, pid: int) -> list[psutil.Process]:
    return [one for one in family(server.running.pid) if title in " ".join(command(one)) and one.pid != pid]


def test_a_bad_adapter_fails_the_start_in_one_line(tiny_model: Path, tmp_path: Path) -> None:
    arguments = [
        "--model",
        str(tiny_model),
        "--max-lora-rank",
        "4",
        "--lora-modules",
        f"big={tiny_model.parent / 'a2'}",
    ]
    log_file = tmp_path / "serve.log"
    process = start_server([*arguments, "--port", str(free_port())], log_file)
    assert process.wait(START_S) == 1
    printed = log_file.read_text()
    assert "'big'" in printed and "rank" in printed and "Traceback" not in printed


def test_a_missing_model_fails_at_once(tmp_path: Path) -> None:
    process = start_server(["--model", str(tmp_path / "nowhere")], tmp_path / "serve.log")
    assert process.wait(START_S) == 1
    assert "nowhere" in (tmp_path / "serve.log").read_text()


def test_what_nobody_expected_ends_the_start_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> NoReturn:
        raise RuntimeError("Ray fell over")

    def end(status: int, run_dir: str) -> NoReturn:
        shutil.rmtree(run_dir)
        raise SystemExit(status)

    for name in ("adopt_orphans", "_catch_signals", "_ignore_signals"):
        monkeypatch.setattr(local, name, lambda: None)
    monkeypatch.setattr(local, "_start", fail)
    monkeypatch.setattr(local, "_exit", end)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    listener = local.Listener("127.0.0.1", free_port(), None, direct_streaming=False)
    with pytest.raises(SystemExit, match="1"):
        local.serve_locally(parse_args({"model": "m"}), listener)
    assert "RuntimeError: Ray fell over" in "".join(capfd.readouterr())


def test_a_signal_that_a_library_swallows_stops_the_start_nevertheless() -> None:
    code = """
import os, signal, sys, time
from lorafleet.cluster.serve import local

class Swallows:
    def __del__(self):  # Python ignores what is raised here
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)

def start(*_):
    Swallows()
    time.sleep(600)

local.AGAIN_S = 0.1
local._start = start
local._leave_nothing = lambda run_dir: os.rmdir(run_dir)
local._check_address = lambda listener: None
local.check_exposure = lambda host, args: None
local.serve_locally(None, local.Listener("127.0.0.1", 1, None, direct_streaming=False))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=START_S)
    assert "Exception ignored" in ended.stderr
    assert (ended.returncode, ended.stdout) == (0, "stopping\nstopped\n")


@pytest.mark.parametrize("reached", ["starting Ray", "starting 1 replica"])
def test_a_signal_during_the_start_leaves_nothing(tiny_model: Path, tmp_path: Path, reached: str) -> None:
    log_file = tmp_path / "serve.log"
    process = start_server(["--model", str(tiny_model), "--port", str(free_port())], log_file)
    wait_until_printed(reached, process, log_file)
    status, left = stop_server(process, signal.SIGTERM)
    assert left == []
    assert status == 0, log_file.read_text()
