"""What the tests' own look at sockets says of processes that end meanwhile."""

from __future__ import annotations

import subprocess
import sys

import psutil

from living import is_alive
from tests.cluster.sockets import listening_ports

LISTEN = "import socket; one = socket.create_server(('127.0.0.1', 0)); print(one.getsockname()[1], flush=True); input()"


def test_a_process_that_ends_between_two_looks_listens_nowhere() -> None:
    child = subprocess.Popen([sys.executable, "-c", LISTEN], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        assert child.stdin is not None and child.stdout is not None
        port, seen = int(child.stdout.readline()), psutil.Process(child.pid)
        assert listening_ports(seen) == [port]
        child.stdin.close()
        child.stdout.read()
        while is_alive(seen):
            pass
        assert listening_ports(seen) == [], "a zombie"
    assert listening_ports(seen) == [], "gone"
