"""Which waits HAProxy ends: those that a client causes, and none in which a replica works. The real HAProxy, with its
bounds shrunk to one second, before toy replicas."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from lorafleet.cluster.serve.serve_environment import ROUTED_BODY_BYTES
from tests.cluster.haproxies import ANSWER_S, running
from tests.cluster.toy_replicas import Answer, choosing, toys

PATH = "/v1/completions"
LONG_S = 2.5  # longer than every bound of the ingress


def stream() -> Iterator[bytes]:
    yield b"first "
    time.sleep(LONG_S)
    yield b"second"


def handle(_path: str, body: bytes) -> Answer:
    if body == b"stream":
        return 200, {}, stream()
    if body == b"late":
        time.sleep(LONG_S)
    return 200, {}, b"answer"


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    bounds = {"headers_s": 1, "client_s": 1, "body_s": 1, "connections_per_client": 5}
    folder = tmp_path_factory.mktemp("haproxy")
    with (
        toys(handle, choosing("r0")) as [replica, router],
        running(folder, [replica.port], {}, router.port, bounds=bounds) as (_, port),
    ):
        yield port


def ask(port: int, body: bytes) -> tuple[int, bytes]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)) as connection:
        connection.request("POST", PATH, body)
        answer = connection.getresponse()
        return answer.status, answer.read()


@pytest.mark.parametrize(("body", "answer"), [(b"stream", b"first second"), (b"late", b"answer")])
def test_a_replica_may_take_longer_than_a_client_may(port: int, body: bytes, answer: bytes) -> None:
    assert ask(port, body) == (200, answer)


def test_a_connection_may_be_idle_between_requests_for_longer_than_within_one(port: int) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)) as connection:
        connection.connect()
        first = connection.sock
        for wait_s in (LONG_S, 0):
            connection.request("POST", PATH, b"")
            assert connection.getresponse().read() == b"answer"
            time.sleep(wait_s)
        assert connection.sock is first


SLOW_HEADERS = b"POST / HTTP/1.1\r\nhost: a\r\nx-slow"
SLOW_BODY = f"POST {PATH} HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\nslow".encode()
SLOW_REST = f"POST {PATH} HTTP/1.1\r\nhost: a\r\ncontent-length: {2 * ROUTED_BODY_BYTES}\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (SLOW_HEADERS, 408, None),
        (SLOW_BODY, 408, "request_timeout"),
        (SLOW_REST + bytes(ROUTED_BODY_BYTES), 400, "invalid_http_request"),
        (b"not HTTP\r\n\r\n", 400, None),
    ],
)
def test_a_request_that_is_sent_too_slowly_is_refused(port: int, sent: bytes, status: int, code: str | None) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S) as connection:
        connection.sendall(sent)
        answer = b"".join(iter(lambda: connection.recv(65_536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    assert code is None or json.loads(body)["error"]["code"] == code
