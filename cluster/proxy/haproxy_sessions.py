"""Frees requests that wait at HAProxy for a replica which has stopped answering. HAProxy sends those that may be
repeated to another replica, and rejects the others after a while."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from lorafleet.cluster.proxy.haproxy_config import PATIENT, WAIT_FOR_SILENT_S

GIVE_UP_S = WAIT_FOR_SILENT_S  # Seconds of silence, after a server was marked down, until nothing waits for it.
TOTALS = ("FRONTEND", "BACKEND")  # Rows of `show stat` that are not servers.

# Bits in `show sess` of HAProxy 2.8: the remaining work on an answer, and what is allowed with a request.
WAITS_FOR_ANSWER = 0x0040_0000  # AN_RES_WAIT_HTTP
MAY_REPEAT = 0x0008_0000  # TX_L7_RETRY
MAY_NOT_REPEAT = 0x0010_0000  # TX_D_L7_RETRY

_SESSION = re.compile(r"^(0x[0-9a-f]+): .* be=(\S+) srv=(\S+) .* rp\[f=\w+,i=\d+,an=([0-9a-f]+)h", re.MULTILINE)
_FLAGS = re.compile(r"\btxn=\S+ flags=0x([0-9a-f]+) ")
_NEVER_SENT_AGAIN = re.compile(r"\bconn_retries=0\b")


@dataclass(frozen=True, slots=True)
class DeadServer:
    """A server that is marked down and still has requests."""

    backend: str
    name: str
    has_others: bool  # Whether another server of the backend is up.
    is_given_up: bool  # Whether it has been silent for so long that nothing waits for it anymore.


async def free_waiting(stats: str, ask: Callable[[str], Awaitable[str]], give_up_s: float = GIVE_UP_S) -> None:
    """Ends requests that wait for a dead server. HAProxy sends those that may be repeated to another server. The
    others end once the server has been silent for give_up_s seconds; HAProxy then says that their outcome is
    unknown.

    `stats` is the output of `show stat`. `ask` sends a command to HAProxy's admin socket and returns the answer.
    """
    for server in dead_servers(stats, give_up_s):
        for session in waiting_sessions(await ask("show sess"), server.backend, server.name):
            if server.is_given_up or (server.has_others and is_repeatable(await ask(f"show sess {session}"))):
                await ask(f"shutdown session {session}")


def dead_servers(stats: str, give_up_s: float) -> Iterator[DeadServer]:
    rows = [row for row in csv.DictReader(io.StringIO(stats.removeprefix("# "))) if row["svname"] not in TOTALS]
    checks = {f"{row['pxname']}/{row['svname']}": row["check_status"] for row in rows}
    alive = {row["pxname"] for row in rows if row["status"].startswith("UP")}
    for row in rows:
        if row["status"].startswith("DOWN") and row["scur"] != "0":
            check = checks.get(row["tracked"], row["check_status"])
            silent_s = float(row["lastchg"]) + (give_up_s if row["pxname"].endswith(PATIENT) else 0)
            is_given_up = not _is_refusal(check) and silent_s >= give_up_s
            yield DeadServer(row["pxname"], row["svname"], row["pxname"] in alive, is_given_up)


def _is_refusal(check_status: str) -> bool:
    """Returns whether the server still answers health checks, if only with an error. It then ends its requests
    itself: it may be about to stop, or have lost its engine."""
    return check_status.removeprefix("* ").startswith("L7STS")


def waiting_sessions(sessions: str, backend: str, server: str) -> Iterator[str]:
    """Yields the ids of sessions that the server has not begun to answer. `sessions` is the output of `show sess`."""
    for session, of_backend, of_server, pending in _SESSION.findall(sessions):
        if (of_backend, of_server) == (backend, server) and int(pending, 16) & WAITS_FOR_ANSWER:
            yield session


def is_repeatable(session: str) -> bool:
    """Returns whether HAProxy will send the request to another server if this session is shut down. It does so once.

    `session` is the output of `show sess ID`. The result is False for a session that has ended.
    """
    found = _FLAGS.search(session)
    flags = 0 if found is None else int(found[1], 16)
    is_first = _NEVER_SENT_AGAIN.search(session) is not None
    return is_first and bool(flags & MAY_REPEAT) and not flags & MAY_NOT_REPEAT
