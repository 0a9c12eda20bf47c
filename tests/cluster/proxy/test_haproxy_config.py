"""What the edited configuration does with faults of replicas and routers, and with clients that take too much: the real
HAProxy before toy replicas."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

import httpx
import pytest

from lorafleet.api.answer.elsewhere import MEANT_HEADER, RETRY_HEADER, RETRY_STATUS
from lorafleet.api.routes.build_api import ROUTES
from lorafleet.cluster.proxy import haproxy
from lorafleet.cluster.proxy.haproxy_answers import MAX_HEADER_BYTES
from lorafleet.cluster.proxy.haproxy_config import REPEATABLE_PATHS
from lorafleet.cluster.proxy.haproxy_sessions import free_waiting, waiting_sessions
from lorafleet.cluster.proxy.waiting_room import NOT_WAITING_PATHS, WaitingRoom
from lorafleet.cluster.routing.route_app import NUM_BYTES_HEADER
from lorafleet.cluster.serve.serve_environment import ROUTED_BODY_BYTES
from tests.cluster.haproxies import ANSWER_S, running, serves_config, start, wait_until
from tests.cluster.toy_replicas import Answer, Handle, Toy, choosing, saying, toys

PATH = "/v1/completions"
FULL = saying("full", RETRY_STATUS, **{MEANT_HEADER: "429", "retry-after": "7"})


def test_what_may_be_repeated_is_every_route_that_infers() -> None:
    posted = {path for method, path, needed, _ in ROUTES if method == "POST" and needed == "infer"}
    assert set(REPEATABLE_PATHS) == {path for path in posted if not path.endswith("/cancel")}


class Behind:
    """HAProxy before two replicas, r0 and r1, and a router that chooses r0."""

    def __init__(self, folder: Path, port: int, replicas: list[Toy], router: Toy) -> None:
        self.folder, self.replicas, self.router = folder, replicas, router
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=ANSWER_S, trust_env=False)
        self.port = port

    def seen(self) -> list[int]:
        return [len(one.seen) for one in self.replicas]

    def command(self, text: str) -> str:
        """HAProxy's answer at its admin socket."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.folder / "admin.sock"))
            connection.sendall(f"{text}\n".encode())
            return b"".join(iter(lambda: connection.recv(65_536), b"")).decode()

    async def ask(self, text: str) -> str:
        return self.command(text)

    def is_down(self, replica: int) -> bool:
        return bool(re.search(rf"^app,r{replica},.*,DOWN", self.command("show stat"), re.MULTILINE))

    def num_waiting(self) -> int:
        """Requests that replicas have not begun to answer."""
        sessions = self.command("show sess")
        return sum(len(list(waiting_sessions(sessions, "app", replica))) for replica in ("r0", "r1"))

    def set(self, *handles: Handle) -> None:
        for replica, handle in zip(self.replicas, handles, strict=True):
            replica.handle = handle
            replica.seen.clear()
            replica.headers.clear()


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    folder = tmp_path_factory.mktemp("haproxy")
    environment = {haproxy.CONNECTIONS_VARIABLE: "20"}
    with toys(saying("r0"), saying("r1"), choosing("r0")) as [*replicas, router]:
        ports = [one.port for one in replicas]
        with running(folder, ports, environment, router.port) as (_, port):
            made = Behind(folder, port, replicas, router)
            with made.http:
                wait_until(lambda: [made.http.post(PATH).text for _ in range(2)] == ["r0", "r0"])
                yield made


def test_the_router_chooses_and_sees_both_ends_of_a_body_and_the_key(behind: Behind) -> None:
    behind.set(saying("r0"), saying("r1"))
    behind.router.seen.clear()
    behind.router.headers.clear()
    body = b"a" * 100_000 + b"b" * 100_000
    answer = behind.http.post(PATH, content=body, headers={"authorization": "Bearer a, b", "x-api-key": "c"})
    assert answer.text == "r0"
    [(path, routed)], [headers] = behind.router.seen, behind.router.headers
    assert path == "/internal/route"
    assert routed == b"a" * 65_536 + b"b" * 65_536
    assert headers[NUM_BYTES_HEADER] == "200000"
    assert (headers["authorization"], headers["x-api-key"]) == ("Bearer a, b", "c")
    assert behind.replicas[0].seen == [(PATH, body)]


@pytest.mark.parametrize("fault", ["refusal", "broken connection"])
def test_a_request_that_has_not_begun_to_be_answered_goes_to_another_replica_once(behind: Behind, fault: str) -> None:
    behind.set(FULL if fault == "refusal" else lambda *_: None, saying("r1"))
    body = b"x" * (ROUTED_BODY_BYTES // 2)
    answer = behind.http.post(PATH, content=body)
    assert (answer.status_code, answer.text) == (200, "r1")
    assert [one.seen for one in behind.replicas] == [[(PATH, body)], [(PATH, body)]]
    ids = [one.headers[0][RETRY_HEADER] for one in behind.replicas]
    assert ids[0] == ids[1] and len(ids[0]) == 36
    wait_until(lambda: behind.http.post(PATH).status_code == 200)


def test_where_all_replicas_are_full_the_client_gets_429(behind: Behind) -> None:
    behind.set(FULL, FULL)
    answer = behind.http.post(PATH, content=b"{}")
    assert (answer.status_code, answer.text, answer.headers["retry-after"]) == (429, "full", "7")
    assert MEANT_HEADER not in answer.headers
    assert behind.seen() == [1, 1]


def test_a_tenants_own_429_is_not_asked_of_another_replica(behind: Behind) -> None:
    behind.set(saying("limit", 429), saying("limit", 429))
    assert behind.http.post(PATH, content=b"{}").status_code == 429
    assert sum(behind.seen()) == 1


@pytest.mark.parametrize("path", ["/v1/admin/adapters", "/v1/load_lora_adapter"])
def test_what_changes_something_is_never_sent_twice(behind: Behind, path: str) -> None:
    behind.set(lambda *_: None, lambda *_: None)
    answer = behind.http.post(path, content=b"{}", headers={RETRY_HEADER: "1"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "outcome_unknown")
    assert sum(behind.seen()) == 1
    assert all(RETRY_HEADER not in headers for one in behind.replicas for headers in one.headers)


def test_without_an_answer_of_the_router_any_replica_is_chosen(behind: Behind) -> None:
    behind.set(saying("ok"), saying("ok"))
    hangs = threading.Event()

    def hang(*_: object) -> None:
        hangs.wait()

    router, chooses = behind.router, behind.router.handle
    try:
        for handle in (lambda *_: None, saying("?", 500), choosing("unknown"), hang):
            router.handle = handle
            assert behind.http.post(PATH, content=b"{}").text == "ok"
    finally:
        hangs.set()
        router.handle = chooses


def test_a_replica_whose_health_check_fails_gets_nothing_new_until_it_is_well(behind: Behind) -> None:
    behind.set(saying("r0"), saying("r1"))
    behind.replicas[0].is_well = False
    try:
        wait_until(lambda: behind.http.post(PATH).text == "r1")
    finally:
        behind.replicas[0].is_well = True
    wait_until(lambda: behind.http.post(PATH).text == "r0")


@pytest.mark.parametrize("path", [PATH, "/v1/admin/adapters"])
async def test_a_request_that_waits_for_a_silent_replica_is_freed_where_it_may_be_repeated(
    behind: Behind, path: str
) -> None:
    goes_on = threading.Event()

    def hang(*_: object) -> Answer:
        goes_on.wait()
        return 200, {}, b"late"

    may_repeat = path == PATH
    behind.set(hang, saying("r1") if may_repeat else hang)  # without the router HAProxy may choose either
    answers: list[str] = []
    asking = threading.Thread(target=lambda: answers.append(behind.http.post(path, content=b"{}").text))
    asking.start()
    try:
        wait_until(lambda: sum(behind.seen()) == 1)
        silent = behind.seen().index(1)
        behind.replicas[silent].is_well = False
        wait_until(lambda: behind.is_down(silent))
        await free_waiting(behind.command("show stat"), behind.ask)
        if may_repeat:
            wait_until(lambda: answers)
    finally:
        goes_on.set()
        asking.join()
        behind.replicas[silent].is_well = True
    assert answers == ["r1" if may_repeat else "late"]
    wait_until(lambda: not behind.is_down(silent))


@pytest.mark.parametrize("is_silent", [True, False])
async def test_a_call_that_may_not_be_repeated_ends_where_its_replica_stays_silent_and_not_where_it_still_refuses(
    behind: Behind, is_silent: bool
) -> None:
    goes_on = threading.Event()

    def hang(*_: object) -> Answer:
        goes_on.wait()
        return 200, {}, b'"late"'

    behind.set(hang, hang)
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(behind.http.post("/v1/admin/adapters", content=b"{}")))
    asking.start()
    try:
        wait_until(lambda: sum(behind.seen()) == 1)
        replica = behind.replicas[behind.seen().index(1)]
        replica.is_well = is_silent
        (replica.is_awake.clear if is_silent else replica.is_awake.set)()
        wait_until(lambda: behind.is_down(behind.replicas.index(replica)))
        await free_waiting(behind.command("show stat"), behind.ask, give_up_s=3600)
        assert not answers and behind.num_waiting() == 1
        for _ in range(1000 if is_silent else 3):
            await free_waiting(behind.command("show stat"), behind.ask, give_up_s=0)
            await asyncio.sleep(0.02)
            if answers:
                break
        assert len(answers) == is_silent
    finally:
        goes_on.set()
        asking.join()
        replica.is_awake.set()
        replica.is_well = True
    [answer] = answers
    assert answer.json() == "late" if not is_silent else answer.json()["error"]["code"] == "outcome_unknown"
    assert answer.status_code == (503 if is_silent else 200) and sum(behind.seen()) == 1
    wait_until(lambda: not behind.is_down(behind.replicas.index(replica)))


def test_while_no_replica_is_up_requests_wait_for_one_and_probes_do_not(tmp_path: Path) -> None:
    body = b"x" * (4 * ROUTED_BODY_BYTES)
    with (
        toys(saying("r0"), choosing("r0"), saying("Serve's own proxy")) as [replica, router, proxy],
        running(tmp_path, [replica.port], {}, router.port, proxy.port, {"client_s": 1}) as (_, port),
        ThreadPoolExecutor() as pool,
    ):
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: httpx.post(url + PATH).text == "r0")
        replica.is_well = False
        wait_until(lambda: httpx.get(f"{url}/health").status_code == 503)
        replica.seen.clear()
        asked = [
            pool.submit(httpx.request, method, url + path, content=body, timeout=ANSWER_S)
            for method, path in (("POST", PATH), ("GET", "/v1/models"), ("POST", "/v1/admin/adapters"))
        ]
        assert not wait(asked, timeout=2).done, "they wait longer than client_s"
        answer = httpx.get(f"{url}/health")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
        assert answer.headers["retry-after"] == "1"
        assert replica.seen == []
        replica.is_well = True
        assert [one.result().text for one in asked] == ["r0"] * 3
        assert [len(sent) for path, sent in replica.seen if path != "/health"] == [len(body)] * 3
        assert proxy.seen == []


def test_requests_that_wait_when_haproxy_is_reloaded_are_answered_by_the_new_replica(tmp_path: Path) -> None:
    with (
        toys(saying("former"), saying("new"), choosing("r0")) as [former, new, router],
        running(tmp_path, [former.port], {}, router.port) as (_, port),
        ThreadPoolExecutor() as pool,
    ):
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: httpx.post(url + PATH).text == "former")
        former.is_well = False
        wait_until(lambda: httpx.get(f"{url}/health").status_code == 503)
        asked = [pool.submit(httpx.post, url + PATH, content=b"{}", timeout=ANSWER_S) for _ in range(3)]
        assert not wait(asked, timeout=1).done
        successor = start(serves_config(tmp_path, [new.port], port, router.port), {})
        try:
            assert [one.result().text for one in asked] == ["new"] * 3
        finally:
            successor.terminate()
            successor.wait(ANSWER_S)


def test_what_waits_is_bounded_in_number_and_time_and_learns_when_to_try_again(tmp_path: Path) -> None:
    room = WaitingRoom(str(tmp_path / "next.sock"), max_requests=3, max_per_key=2, wait_s=4, expected_s=28)
    with (
        toys(saying("r0"), choosing("r0")) as [replica, router],
        running(tmp_path, [replica.port], {}, router.port, bounds={"waiting": room}) as (_, port),
        ThreadPoolExecutor() as pool,
    ):
        url = f"http://127.0.0.1:{port}{PATH}"
        replica.is_well = False
        wait_until(lambda: httpx.get(f"http://127.0.0.1:{port}/health").status_code == 503)

        def ask(key: str) -> Future[httpx.Response]:
            return pool.submit(httpx.post, url, headers={"authorization": key}, timeout=ANSWER_S)

        asked = [ask("Bearer a") for _ in range(3)]
        [beyond] = wait(asked, return_when=FIRST_COMPLETED).done
        others = [ask("Bearer b") for _ in range(2)]
        [beyond_all] = wait(others, return_when=FIRST_COMPLETED).done
        assert [one.done() for one in asked].count(True) == 1, "the others still wait"
        for one in (beyond, beyond_all, *asked, *others):
            answer = one.result()
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "replica_starting")
            assert answer.headers["retry-after"] == "28"
        replica.is_well = True
        wait_until(lambda: httpx.post(url).text == "r0")


def test_probes_and_metrics_are_what_does_not_wait_for_a_replica() -> None:
    assert set(NOT_WAITING_PATHS) == {
        path for method, path, needed, _ in ROUTES if method == "GET" and needed in ("open", "metrics")
    }


def test_before_serve_has_named_the_application_the_client_gets_503_and_not_404(tmp_path: Path) -> None:
    with running(tmp_path, [], {}) as (_, port):
        answer = httpx.post(f"http://127.0.0.1:{port}{PATH}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
    assert answer.headers["retry-after"] == "1"


def test_where_every_replica_is_silent_requests_are_sent_to_one_until_it_has_been_silent_for_long(
    tmp_path: Path,
) -> None:
    with (
        toys(saying("ok"), saying("refuses"), choosing("r1")) as [silent, refusing, router],
        running(tmp_path, [silent.port, refusing.port], {}, router.port, bounds={"wait_for_silent_s": 8}) as (_, port),
    ):
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: httpx.post(url + PATH).text == "refuses")
        silent.is_awake.clear()
        refusing.is_well = False
        try:
            wait_until(lambda: httpx.post(url + PATH).text == "ok")
            wait_until(lambda: httpx.get(f"{url}/health").status_code == 503)
        finally:
            silent.is_awake.set()
        wait_until(lambda: httpx.post(url + PATH).text == "ok")
        assert httpx.post(f"{url}/v1/admin/adapters").text == "ok"


def test_headers_beyond_their_bound_are_refused_by_name(behind: Behind) -> None:
    answer = behind.http.get("/", headers={"x-large": "x" * MAX_HEADER_BYTES})
    assert (answer.status_code, answer.json()["error"]["code"]) == (431, "headers_too_large")


def test_one_address_cannot_hold_all_connections(behind: Behind) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            with contextlib.suppress(ConnectionResetError):  # HAProxy may refuse one before connect() has returned
                stack.enter_context(
                    socket.create_connection(("127.0.0.1", behind.port), source_address=("127.0.0.2", 0))
                )
        same = stack.enter_context(httpx.Client(transport=httpx.HTTPTransport(local_address="127.0.0.2")))
        with pytest.raises(httpx.HTTPError):
            same.get(f"http://127.0.0.1:{behind.port}/")
        assert behind.http.get("/").status_code == 200


def test_without_a_key_no_body_is_waited_for(tmp_path: Path) -> None:
    environment = {haproxy.NEEDS_KEY_VARIABLE: "1"}
    with (
        toys(saying("no key", 401), choosing("r0")) as [replica, router],
        running(tmp_path, [replica.port], environment, router.port) as (_, port),
    ):
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: httpx.get(url).status_code == 401)
        assert httpx.post(url + PATH, content=b"x").status_code == 401
        assert router.seen == []
        assert httpx.post(url + PATH, content=b"x", headers={"x-api-key": "k"}).status_code == 401
        assert router.seen == [("/internal/route", b"x")]


def test_a_new_manager_takes_over_the_running_haproxy_with_its_replicas(tmp_path: Path) -> None:
    """A manager that was replaced knows no replicas at first; those that HAProxy has go on being asked."""
    with toys(saying("r0")) as [replica], running(tmp_path, [replica.port], {}) as (pid, port):
        url = f"http://127.0.0.1:{port}/"
        wait_until(lambda: httpx.get(url).status_code == 200)
        answers: list[int] = []
        is_over = threading.Event()

        def ask() -> None:
            while not is_over.is_set():
                answers.append(httpx.get(url).status_code)

        asking = threading.Thread(target=ask)
        asking.start()
        second = start(serves_config(tmp_path, [], port), {})
        try:
            wait_until(lambda: haproxy.running_pid(str(tmp_path / "admin.sock")) == second.pid)
            wait_until(lambda: replica.seen and len(answers) > 20)
        finally:
            is_over.set()
            asking.join()
            second.terminate()
            second.wait(ANSWER_S)
        assert set(answers) == {200}
        assert pid != second.pid
