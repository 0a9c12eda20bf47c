"""Frees requests that wait at HAProxy for a replica which has stopped answering: HAProxy sends them to another one."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Awaitable, Callable, Iterator

TOTALS = ("FRONTEND", "BACKEND")  # rows of `show stat` that are no servers

# Bits of HAProxy 2.8, in `show sess`: what it has yet to do with an answer, and what it may do with a request.
WAITS_FOR_ANSWER = 0x0040_0000  # AN_RES_WAIT_HTTP
MAY_REPEAT = 0x0008_0000  # TX_L7_RETRY
MAY_NOT_REPEAT = 0x0010_0000  # TX_D_L7_RETRY

_SESSION = re.compile(r"^(0x[0-9a-f]+): .* be=(\S+) srv=(\S+) .* rp\[f=\w+,i=\d+,an=([0-9a-f]+)h", re.MULTILINE)
_FLAGS = re.compile(r"\btxn=\S+ flags=0x([0-9a-f]+) ")


async def free_waiting(stats: str, ask: Callable[[str], Awaitable[str]]) -> None:
    """Ends what waits for a dead server, as far as another one can answer it.

    stats: as `show stat` gives them. ask: sends a command to HAProxy's admin socket, and returns the answer.
    """
    for backend, server in dead_servers(stats):
        for session in waiting_sessions(await ask("show sess"), backend, server):
            if is_repeatable(await ask(f"show sess {session}")):
                await ask(f"shutdown session {session}")


def dead_servers(stats: str) -> Iterator[tuple[str, str]]:
    """Yields (backend, server) for what is down and has requests, where another server of the backend is up."""
    rows = [row for row in csv.DictReader(io.StringIO(stats.removeprefix("# "))) if row["svname"] not in TOTALS]
    alive = {row["pxname"] for row in rows if row["status"].startswith("UP") and row["bck"] == "0"}
    for row in rows:
        if row["status"].startswith("DOWN") and row["scur"] != "0" and row["pxname"] in alive:
            yield row["pxname"], row["svname"]


def waiting_sessions(sessions: str, backend: str, server: str) -> Iterator[str]:
    """Yields the ids of those that the server has not begun to answer. sessions: as `show sess` gives them."""
    for session, of_backend, of_server, pending in _SESSION.findall(sessions):
        if (of_backend, of_server) == (backend, server) and int(pending, 16) & WAITS_FOR_ANSWER:
            yield session


def is_repeatable(session: str) -> bool:
    """session: as `show sess ID` gives it. False for a session that has ended."""
    found = _FLAGS.search(session)
    flags = 0 if found is None else int(found[1], 16)
    return bool(flags & MAY_REPEAT) and not flags & MAY_NOT_REPEAT
