"""A server with two ranks and TLS in front opens nothing else to the network.

Its traces are tested here too, since all of its processes run here."""

from __future__ import annotations

import secrets
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import openai
import psutil
import pytest
from openai import DefaultHttpxClient, OpenAI

from living import command, family
from otlp_receiver import Receiver
from tests.cluster.certificates import Authority, serial_seen
from tests.cluster.sockets import listening_ports, reachable_from_elsewhere
from tests.cluster.two_ranks import TwoRanks

pytestmark = pytest.mark.xdist_group("two_ranks")
ANSWER_S = 20.0  # The test lasts as long as this: some ports that speak no HTTP never answer.


@pytest.fixture
def server(two_ranks: TwoRanks) -> TwoRanks:
    return two_ranks


@pytest.fixture
def port(two_ranks: TwoRanks) -> int:
    return int(two_ranks.url.rpartition(":")[2])


@pytest.fixture
def authority(two_ranks: TwoRanks) -> Authority:
    assert two_ranks.authority is not None
    return two_ranks.authority


@pytest.fixture
def collector(two_ranks: TwoRanks) -> Receiver:
    assert two_ranks.collector is not None
    return two_ranks.collector


def test_nothing_listens_beyond_the_loopback_interface(server: TwoRanks) -> None:
    assert len(server.processes("WorkerActor")) == 2  # these are the processes that are looked at
    assert reachable_from_elsewhere(server.pid) == []


@pytest.mark.parametrize(
    ("process", "method"),
    [
        ("gcs/gcs_server", "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"),
        ("raylet/raylet", "/ray.rpc.NodeManagerService/GetNodeStats"),
        ("ServeReplica:lorafleet:EngineReplica", "/ray.serve.ASGIService/HandleRequest"),
    ],
)
def test_ray_answers_nobody_without_its_token(server: TwoRanks, process: str, method: str) -> None:
    [pid, *_] = server.processes(process)
    answers = {_call(port, method) for port in listening_ports(psutil.Process(pid))}
    assert grpc.StatusCode.UNAUTHENTICATED in answers and None not in answers, answers


def test_no_process_of_rays_answers_http_without_the_token(server: TwoRanks) -> None:
    """But for the replicas' own API, HAProxy, and Serve's proxy and router, which are no ports of Ray's."""
    ours = ("haproxy", "ServeReplica", "ProxyActor")
    titles: dict[int, str] = {}  # by port
    for process in family(server.pid):
        title = " ".join(command(process))
        if not any(name in title for name in ours):
            titles |= dict.fromkeys(listening_ports(process), title[-60:])
    with ThreadPoolExecutor(max(1, len(titles))) as pool:
        answers = [*zip(titles.values(), pool.map(_status, titles), strict=True)]
    statuses = {status for _, status in answers} - {None}
    assert statuses, "some speak HTTP: else this test sees nothing"
    assert statuses == {401}, answers


def _status(port: int) -> int | None:
    """Of an HTTP answer; None where there is none, as of a port that speaks gRPC."""
    try:
        return httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=ANSWER_S).status_code
    except httpx.HTTPError:
        return None


def _call(port: int, method: str) -> grpc.StatusCode | None:
    """How an empty gRPC call without a token fails; None where it does not."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            channel.unary_unary(method)(b"", timeout=60)
        except grpc.RpcError as error:
            return error.code()
    return None


def test_openais_client_speaks_tls_with_a_private_authority(port: int, authority: Authority) -> None:
    url = f"https://localhost:{port}/v1"
    with OpenAI(base_url=url, api_key="none", http_client=DefaultHttpxClient(verify=authority.client())) as client:
        stream = client.completions.create(
            model="qv", prompt="hello", max_tokens=8, stream=True, extra_body={"ignore_eos": True}
        )
        assert len(list(stream)) >= 2  # a token may end in the middle of a character, which waits for the next
    with OpenAI(base_url=url, api_key="none", max_retries=0) as stranger, pytest.raises(openai.APIConnectionError):
        stranger.models.list()


def test_a_request_is_traced_from_the_router_to_its_last_step(
    port: int, authority: Authority, collector: Receiver
) -> None:
    trace_id = secrets.token_hex(16)
    before_s = time.time()
    answer = httpx.post(
        f"https://localhost:{port}/v1/completions",
        json={"model": "qv", "prompt": "hello", "max_tokens": 8, "ignore_eos": True},
        headers={"traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01"},
        verify=authority.client(),
        timeout=60,
    )
    after_s = time.time()
    whole, parts = collector.trace(trace_id)
    assert whole.attributes["gen_ai.usage.output_tokens"] == answer.json()["usage"]["completion_tokens"] == 8
    names = [part.name for part in parts if part.name != "load adapter"]  # it may be in a slot already
    assert names == ["route", "find adapter", "queue", "prefill", "decode"]
    for part in parts:
        assert before_s <= part.began_s <= part.ended_s <= after_s, part
    # The server may close the whole one when the client has read its answer already.
    assert before_s <= whole.began_s <= whole.ended_s <= time.time()
    of = {part.name: part for part in parts}
    assert whole.began_s <= of["find adapter"].began_s and of["decode"].ended_s <= whole.ended_s
    assert of["queue"].ended_s <= of["prefill"].ended_s <= of["decode"].ended_s


def test_the_running_server_takes_a_renewed_certificate(port: int, authority: Authority) -> None:
    first = serial_seen(port, authority.client())
    authority.issue("server", "localhost")
    deadline = time.monotonic() + 120
    while serial_seen(port, authority.client()) == first:
        assert time.monotonic() < deadline
        time.sleep(0.2)
