"""Runs in place of one of a node's two Ray agents: it starts the agent, and restarts it whenever it has ended.

A raylet ends, with all workers of its node, when the program that it started as an agent ends. ray_agents.py makes
raylets start this program instead. Its interpreter imports only the standard library, so little can end it. It ends
with its raylet. If it ends earlier, its raylet ends too, as raylets do when an agent ends without it. Raylets end
their agents by killing them.
"""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

RAYLET_VARIABLE = "RAY_RAYLET_PID"  # An agent ends if its parent is not the process with this id.
PORT_NAMES = {  # option of an agent: the file (without node id) in which the agent stores its port for the raylet
    "--grpc-port": "metrics_agent_port",
    "--listen-port": "dashboard_agent_listen_port",
    "--metrics-export-port": "metrics_export_port",
    "--runtime-env-agent-port": "runtime_env_agent_port",
}
SHORTEST_PAUSE_S = 0.1  # Seconds before an agent is restarted; doubled each time that it ended within SOON_S.
LONGEST_PAUSE_S = 30.0
SOON_S = 60.0

_OPTION = re.compile(r"(--[a-z-]+)=(.*)", re.DOTALL)


def keep(command: Sequence[str], raylet_pid: int) -> int:
    """Runs the agent until the raylet has ended or the agent fails to start. Returns this program's exit status."""
    raylet = os.pidfd_open(raylet_pid)
    environment = os.environ | {RAYLET_VARIABLE: str(os.getpid())}
    pause_s = SHORTEST_PAUSE_S
    while True:
        began_s = time.monotonic()
        agent = subprocess.Popen(command, env=environment)
        if _ended(raylet, os.pidfd_open(agent.pid)):
            return 0
        status = agent.wait()
        ports = bound_ports(command)
        if ports is None:
            return 1  # The raylet waits for the ports, and reports best that they are missing.
        command = with_ports(command, ports)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S) if time.monotonic() - began_s < SOON_S else SHORTEST_PAUSE_S
        print(f"an agent ended with status {status} and is restarted in {pause_s} s", file=sys.stderr, flush=True)
        if _ended(raylet, within_s=pause_s):
            return 0


def bound_ports(command: Sequence[str]) -> dict[str, int] | None:
    """Returns the agent's ports by option, or None if it has not bound all of them yet."""
    options = _options(command)
    folder, node_id = Path(options["--session-dir"]), options["--node-id"]
    files = {option: folder / f"{name}_{node_id}" for option, name in PORT_NAMES.items() if option in options}
    if not all(file.exists() for file in files.values()):
        return None
    return {option: int(file.read_text()) for option, file in files.items()}


def with_ports(command: Sequence[str], ports: Mapping[str, int]) -> list[str]:
    """Returns the command with these ports, where the raylet and the workers expect the agent. A port that is not in
    use is -1, and its option stays unchanged."""
    wanted = {option: f"{option}={port}" for option, port in ports.items() if port > 0}
    return [wanted.get(argument.partition("=")[0], argument) for argument in command]


def _options(command: Sequence[str]) -> dict[str, str]:
    found = (_OPTION.fullmatch(argument) for argument in command)
    return {option[1]: option[2] for option in found if option is not None}


def _ended(raylet: int, agent: int | None = None, within_s: float | None = None) -> bool:
    """Waits until one of these processes, given as pidfds, has ended, or for `within_s` seconds. Returns whether the
    raylet has ended."""
    poll = select.poll()
    for process in (raylet,) if agent is None else (raylet, agent):
        poll.register(process, select.POLLIN)
    ended = [process for process, _ in poll.poll(None if within_s is None else 1000 * within_s)]
    if agent is not None:
        os.close(agent)
    return raylet in ended


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1:], int(os.environ[RAYLET_VARIABLE])))
