"""Ray Serve's manager of HAProxy, which also watches over it: an actor on every node that clients reach.

Serve's own manager starts HAProxy and hands it new configurations, but does not notice for half a minute that it has
ended. This one starts another at once. It also frees requests that wait for a replica which has stopped answering:
HAProxy sends those to another replica that have not begun to be answered and may be repeated.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator
from typing import Any

import ray
from ray.serve._private import haproxy as serves

LOOK_S = 0.2  # between looks at HAProxy
SILENT_S = 2.0  # HAProxy is ended when it has not answered at its admin socket for so long
ROUTED = "-via-ingress-request-router"  # ends the name of a backend that has the same replicas as the one without

# Bits of HAProxy 2.8, in `show sess`: what it has yet to do with an answer, and what it may do with a request.
WAITS_FOR_ANSWER = 0x0040_0000  # AN_RES_WAIT_HTTP
MAY_REPEAT = 0x0800  # TX_L7_RETRY
MAY_NOT_REPEAT = 0x1000  # TX_D_L7_RETRY

logger = logging.getLogger("ray.serve")

_SESSION = re.compile(r"^(0x[0-9a-f]+): .* be=(\S+) srv=(\S+) .* rp\[f=\w+,i=\d+,an=([0-9a-f]+)h", re.MULTILINE)
_FLAGS = re.compile(r"\btxn=\S+ flags=0x([0-9a-f]+) ")

ServesManager: Any = serves.HAProxyManager.__ray_metadata__.modified_class  # type: ignore[attr-defined]  # Ray adds it


class WatchedHAProxyManager(ServesManager):  # type: ignore[misc]  # Ray gives no type
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._watching = self.event_loop.create_task(self._watch())

    async def _update_haproxy_backends(self) -> None:
        """Serve's fallback may be known before the replicas are: HAProxy would forget those that it has."""
        if self._received_target_groups_broadcast:
            await super()._update_haproxy_backends()

    async def shutdown(self) -> None:
        self._watching.cancel()
        await super().shutdown()

    async def _watch(self) -> None:
        await self._haproxy_start_task
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._look()
            except Exception:  # Whatever it was, HAProxy must go on being watched.
                logger.exception("HAProxy could not be looked after; this is tried again.")

    async def _look(self) -> None:
        """Not while it is reloaded: then Serve watches over the new process itself."""
        async with self._reload_lock:
            stats = await self._ask_stats()
            if stats is None:
                await self._replace()
                return
        for backend, server in dead_servers(stats):
            await self._free(backend, server)

    async def _ask_stats(self) -> str | None:
        """None where HAProxy has ended, or is silent."""
        if self._haproxy._proc.returncode is not None:
            return None
        try:
            return str(await asyncio.wait_for(self._haproxy._send_socket_command("show stat"), SILENT_S))
        except (TimeoutError, RuntimeError) as error:
            logger.error("HAProxy does not answer: %r", error)
            return None

    async def _replace(self) -> None:
        process = self._haproxy._proc
        if process.returncode is None:
            process.kill()
        logger.error("HAProxy ended with status %s. Another one is started.", await process.wait())
        self._haproxy._proc = await self._haproxy._start_and_wait_for_haproxy()

    async def _free(self, backend: str, server: str) -> None:
        """Ends what waits for the dead server, as far as another one can answer it."""
        sessions = await self._haproxy._send_socket_command("show sess")
        for session in waiting_sessions(sessions, backend, server):
            if is_repeatable(await self._haproxy._send_socket_command(f"show sess {session}")):
                await self._haproxy._send_socket_command(f"shutdown session {session}")


def dead_servers(stats: str) -> Iterator[tuple[str, str]]:
    """Yields (backend, server) for what is down and has requests, where another server of the backend is up."""
    parsed = serves.HAProxyApi._parse_haproxy_csv_stats(stats)
    for backend, servers in parsed.items():
        replicas = {name: one for name, one in servers.items() if name not in ("FRONTEND", "BACKEND")}
        if not any(one.status.startswith("UP") for one in replicas.values()):
            continue
        for name, one in replicas.items():
            if one.status.startswith("DOWN") and one.current_sessions:
                yield backend, name


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


Manager = ray.remote(num_cpus=0)(WatchedHAProxyManager)
