"""Makes the raylets that this process starts outlive their agents (see agent_keeper.py).

`lorafleet serve` calls keep_agents() before it starts Ray. On a cluster `ray start` calls it, through the variable
RAY_START_HOOK in its environment. Ray has no setting for this: the function of Ray's that is replaced here is
private.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ray._private import ray_constants, services

AGENTS = (ray_constants.PROCESS_TYPE_DASHBOARD_AGENT, ray_constants.PROCESS_TYPE_RUNTIME_ENV_AGENT)
KEEPER = Path(__file__).with_name("agent_keeper.py")

_rays_command = services._build_python_executable_command_memory_profileable


def keep_agents(_ray_params: object = None, _is_head: bool = True) -> None:
    """Makes raylets start agent_keeper.py in place of their agents. Takes the arguments that Ray passes to such a
    hook. Does nothing if the system has no pidfds: before Linux 5.3, and on other systems."""
    if _has_pidfds():
        services._build_python_executable_command_memory_profileable = _kept_command


def _kept_command(component: str, session_dir: str, unbuffered: bool = True) -> list[str]:
    """Returns the command that starts one of Ray's Python programs, without the program and its arguments."""
    command: list[str] = _rays_command(component, session_dir, unbuffered)
    return [sys.executable, "-I", "-S", str(KEEPER), *command] if component in AGENTS else command


def _has_pidfds() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True
