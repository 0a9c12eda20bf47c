from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import psutil
import pytest
from ray._common.utils import load_class
from ray._private import ray_constants, services

from living import kill
from lorafleet.cluster.serve import cluster_environment
from lorafleet.cluster.serve.agent_keeper import RAYLET_VARIABLE, with_ports
from lorafleet.cluster.serve.ray_agents import AGENTS, KEEPER, keep_agents

PATIENCE_S = 60.0
# Leaves a port, as an agent does; then a line with its process, parent and arguments, and stays.
AGENT = """
    import os, sys, time
    folder, port = sys.argv[1].partition("=")[2], sys.argv[3].partition("=")[2]
    with open(f"{folder}/runtime_env_agent_port_n1", "w") as file:
        file.write(port if port != "0" else "4711")
    with open(f"{folder}/starts", "a") as file:
        file.write(f"{os.getpid()} {os.environ['RAY_RAYLET_PID'] == str(os.getppid())} {sys.argv[3]}\\n")
    time.sleep(600)
"""


@pytest.fixture
def raylet() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stays until the test ends it."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.fixture
def keeper(raylet: subprocess.Popen[bytes], tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    with start_keeper(raylet, tmp_path, AGENT) as process:
        starts(tmp_path, 1)
        yield process
        process.kill()
    kill(psutil.Process(int(pid)) for pid, *_ in starts(tmp_path, 1) if psutil.pid_exists(int(pid)))


def start_keeper(raylet: subprocess.Popen[bytes], folder: Path, agent: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", dedent(agent), f"--session-dir={folder}", "--node-id=n1"]
    command.append("--runtime-env-agent-port=0")
    environment = os.environ | {RAYLET_VARIABLE: str(raylet.pid)}
    return subprocess.Popen([sys.executable, "-I", "-S", KEEPER, *command], env=environment)


def starts(folder: Path, count: int) -> list[list[str]]:
    """What the agents have written, as soon as there were so many."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        file = folder / "starts"
        lines = file.read_text().splitlines() if file.exists() else []
        if len(lines) >= count:
            return [line.split() for line in lines]
        assert time.monotonic() < deadline_s, lines
        time.sleep(0.02)


def test_an_agent_that_is_killed_is_started_again_on_its_port(keeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    for count in (1, 2):
        psutil.Process(int(starts(tmp_path, count)[-1][0])).kill()
    seen = starts(tmp_path, 3)
    assert [is_child for _, is_child, _ in seen] == ["True"] * 3, "Ray's agents end where their parent is another one"
    assert [port for *_, port in seen] == [f"--runtime-env-agent-port={port}" for port in (0, 4711, 4711)]
    assert keeper.poll() is None


def test_a_keeper_ends_with_its_raylet(
    raylet: subprocess.Popen[bytes], keeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    raylet.kill()
    assert keeper.wait(PATIENCE_S) == 0
    assert len(starts(tmp_path, 1)) == 1


def test_an_agent_that_never_came_up_is_left_to_the_raylet(raylet: subprocess.Popen[bytes], tmp_path: Path) -> None:
    assert start_keeper(raylet, tmp_path, "raise SystemExit('no such module')").wait(PATIENCE_S) == 1


def test_a_port_that_is_not_in_use_stays_as_it_was_asked_for() -> None:
    command = ["agent.py", "--grpc-port=0", "--metrics-export-port=0", "--head"]
    ports = {"--grpc-port": 40_001, "--metrics-export-port": -1}
    assert with_ports(command, ports) == ["agent.py", "--grpc-port=40001", "--metrics-export-port=0", "--head"]


def test_ray_start_and_lorafleet_serve_put_a_keeper_before_both_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "_build_python_executable_command_memory_profileable"
    monkeypatch.setattr(services, name, getattr(services, name))  # put back afterwards
    hook = load_class(cluster_environment.NEEDED[ray_constants.RAY_START_HOOK])  # type: ignore[no-untyped-call]  # Ray's
    hook(object(), True)
    keep_agents()
    for agent in AGENTS:
        command = getattr(services, name)(agent, "/session")
        assert command.count(str(KEEPER)) == 1
        assert command[command.index(str(KEEPER)) + 1 :] == [sys.executable, "-u"]
    assert str(KEEPER) not in getattr(services, name)(ray_constants.PROCESS_TYPE_DASHBOARD, "/session", False)
