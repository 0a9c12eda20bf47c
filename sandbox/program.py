"""The main loop of a sandboxed program: it confines the process, then answers one message after another."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from typing import Any

from lorafleet.protocol.framing import receive, send
from lorafleet.sandbox.confinement import confine, cpu_limit

SETTINGS = "LORAFLEET_SANDBOX"  # Environment variable with the program's settings as JSON.


def settings() -> dict[str, Any]:
    """Returns the settings that SandboxProcess was given for this program."""
    found: dict[str, Any] = json.loads(os.environ[SETTINGS])
    return found


def serve(answer: Callable[[bytearray], bytes]) -> None:
    """Answers the messages on standard input, a socket, until its other end is closed."""
    server, limits = socket.socket(fileno=0), settings()
    confine(limits["memory_bytes"])
    while (message := receive(server)) is not None:
        with cpu_limit(limits["cpu_s"]):
            found = answer(message)
        del message  # frees its memory before the next message arrives
        send(server, found)
