"""No client's work delays the server's duties or another client's work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from lorafleet.api.access import work_threads
from lorafleet.api.access.work_threads import CHECKS, WorkKind, in_turn, on_duty, work_for
from lorafleet.api.app_state import AppState
from lorafleet.api.routes.build_api import build_api
from lorafleet.protocol.errors import QueueFull

KINDS = [kind for kind in vars(work_threads).values() if isinstance(kind, WorkKind)]


async def as_client(client: str, kind: WorkKind, work: threading.Event) -> bool:
    work_for(client)
    return await in_turn(kind, work.wait)


@asynccontextmanager
async def occupied_threads() -> AsyncIterator[None]:
    """Lets a client occupy all threads that it can get of each kind, and all of asyncio's, within the block."""
    go, loop = threading.Event(), asyncio.get_running_loop()
    held = [loop.run_in_executor(None, go.wait) for _ in range(64)]
    held += [asyncio.ensure_future(as_client("loud", kind, go)) for kind in KINDS for _ in range(20)]
    await asyncio.sleep(0)
    try:
        yield
    finally:
        go.set()
        await asyncio.gather(*held)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
async def test_a_client_s_work_keeps_no_other_client_waiting(kind: WorkKind) -> None:
    async with occupied_threads():
        done = threading.Event()
        done.set()
        assert await asyncio.create_task(as_client("quiet", kind, done))


async def test_a_client_s_waiting_work_is_bounded() -> None:
    go = threading.Event()
    most = CHECKS.limits.running_of_one + CHECKS.limits.waiting
    held = [asyncio.create_task(as_client("loud", CHECKS, go)) for _ in range(most + 1)]
    with pytest.raises(QueueFull, match="'checks of requests'"):
        await held[-1]
    go.set()
    assert all(await asyncio.gather(*held[:-1]))


async def test_duties_run_while_clients_occupy_all_threads() -> None:
    async with occupied_threads():
        assert await on_duty(lambda: "done") == "done"


async def test_metrics_and_health_answer_while_clients_occupy_all_threads(front: AppState) -> None:
    transport = httpx.ASGITransport(build_api(lambda: front))
    async with occupied_threads(), httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        assert (await http.get("/health")).status_code == 200
        assert "lorafleet_" in (await http.get("/metrics")).text


async def test_work_that_a_request_starts_takes_the_turns_of_its_caller() -> None:
    async with occupied_threads():
        work_for("loud")
        go = threading.Event()
        go.set()
        inherited = asyncio.create_task(in_turn(CHECKS, go.wait))  # A task that the request starts.
        await asyncio.sleep(0)
        assert await asyncio.create_task(as_client("quiet", CHECKS, go))
        assert not inherited.done()
    assert await inherited
