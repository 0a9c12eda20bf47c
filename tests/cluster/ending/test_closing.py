"""A server that ends takes no more requests, and waits for those that it has."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from lorafleet.cluster.ending.closing import close_ingress
from lorafleet.cluster.ending.finishing import finish_requests
from tests.cluster.haproxies import running
from tests.cluster.toy_replicas import Answer, toys


def test_a_closed_haproxy_refuses_connections_and_finishes_its_answers(tmp_path: Path) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def answer(_path: str, _body: bytes) -> Answer:
        def chunks() -> Iterator[bytes]:
            yield b"first "
            has_begun.set()
            may_end.wait()
            yield b"last"

        return 200, {}, chunks()

    with (
        toys(answer) as [replica],
        running(tmp_path, [replica.port], {}) as (_, port),
        ThreadPoolExecutor(1) as pool,
    ):
        url = f"http://127.0.0.1:{port}/v1/models"
        stream = pool.submit(httpx.get, url, timeout=60)
        has_begun.wait()
        try:
            assert [close_ingress(str(tmp_path)) for _ in range(2)] == [1, 1]
            with pytest.raises(httpx.ConnectError):
                httpx.get(url, timeout=60)
        finally:
            may_end.set()
        assert stream.result().text == "first last"
        while close_ingress(str(tmp_path)):
            pass


class Time:
    """A clock that only sleeps move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("in_haproxy", "in_replicas", "left"),
    [
        ([0], [0], 0),
        ([2, 1, 0], [2, 1, 1, 0], 0),
        ([0, 0], [0, 1], 0),  # One was between the two at the first look.
        ([1] * 1000, [1] * 1000, 1),
    ],
    ids=["idle", "in a while", "one look is not enough", "too long"],
)
async def test_it_waits_until_nobody_has_a_request_or_the_time_is_over(
    in_haproxy: list[int], in_replicas: list[int], left: int
) -> None:
    clock, proxies, replicas = Time(), iter(in_haproxy), iter(in_replicas)
    reports: list[int] = []

    async def ask_replicas() -> int:
        return next(replicas, 0)

    found = await finish_requests(
        lambda: next(proxies, 0),
        ask_replicas,
        lambda: False,
        60.0,
        reports.append,
        clock,
        clock.sleep,
    )
    assert found == left
    assert next(proxies, None) is None or left, "each look closes the ingress again"
    assert len(reports) == any(in_haproxy + in_replicas), "that it waits is told once"


async def test_it_does_not_wait_for_a_ray_that_has_ended() -> None:
    async def ask_replicas() -> int:
        return 0

    assert await finish_requests(lambda: 3, ask_replicas, lambda: True, 60.0, print) == 3
