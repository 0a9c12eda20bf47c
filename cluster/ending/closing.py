"""Closes the ingress of a server that ends: HAProxy accepts no more connections, and goes on with those it has."""

from __future__ import annotations

import csv
import io
import socket
from collections.abc import Iterator
from pathlib import Path

from lorafleet.cluster.proxy.haproxy_sessions import TOTALS

ASK_S = 2.0
OWN_PAGES = ("stats", "prometheus")


def close_ingress(run_dir: str) -> int:
    """Makes the HAProxies of this machine accept no more connections. Returns the number of requests in them. It can
    be called again and again: a HAProxy that was reloaded meanwhile is closed as well.

    `run_dir` is the folder of serve_environment.prepare().
    """
    return sum(_close(path) for path in Path(run_dir).glob("**/admin.sock"))


def _close(admin_socket: Path) -> int:
    try:
        _ask(admin_socket, "disable frontend http_frontend")
        return requests_in(_ask(admin_socket, "show stat"))
    except OSError:  # HAProxy has ended, and nothing is left of its requests.
        return 0


def requests_in(stats: str) -> int:
    """Returns the number of requests that wait for a replica or are being answered. `stats` is `show stat`'s output."""
    return sum(_requests_of_backends(stats))


def _requests_of_backends(stats: str) -> Iterator[int]:
    _, backend = TOTALS
    for row in csv.DictReader(io.StringIO(stats.removeprefix("# "))):
        if row["svname"] == backend and row["pxname"] not in OWN_PAGES:
            yield int(row["scur"])


def _ask(admin_socket: Path, command: str) -> str:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ASK_S)
        connection.connect(str(admin_socket))
        connection.sendall(f"{command}\n".encode())
        return b"".join(iter(lambda: connection.recv(65_536), b"")).decode()
