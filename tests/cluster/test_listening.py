"""What a server, started as `make demo` starts it, opens to the network: nothing. With two ranks, and TLS in front.
And what it tells a collector of traces, since all its processes are here."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import openai
import psutil
import pytest
from openai import DefaultHttpxClient, OpenAI

from living import command, family
from otlp_receiver import Receiver, receiver
from tests.cluster.certificates import Authority, serial_seen
from tests.cluster.harness import RunningServer, serving
from tests.cluster.sockets import listening_ports, reachable_from_elsewhere

DEMO = Path(__file__).parents[2] / "demo"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("tls") / "ca")


@pytest.fixture(scope="module")
def collector() -> Iterator[Receiver]:
    with receiver() as made:
        yield made


@pytest.fixture(scope="module")
def server(
    authority: Authority, collector: Receiver, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    cert, key = authority.issue("server", "localhost")
    arguments = ["--model", str(DEMO / "model"), "--served-model-name", "demo", "--tp", "2"]
    arguments += ["--lora-modules", f"shout={DEMO / 'adapters' / 'shout'}", "--kv-cache-tokens", "4096"]
    arguments += ["--ssl-certfile", str(cert), "--ssl-keyfile", str(key)]
    arguments += ["--otlp-traces-endpoint", collector.endpoint, "--otlp-traces-ratio", "0"]
    with serving(arguments, tmp_path_factory.mktemp("log") / "serve.log") as running:
        yield running


@pytest.fixture(scope="module")
def port(server: RunningServer) -> int:
    return int(server.url.rpartition(":")[2])


def test_nothing_listens_beyond_the_loopback_interface(server: RunningServer) -> None:
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
def test_ray_answers_nobody_without_its_token(server: RunningServer, process: str, method: str) -> None:
    [pid, *_] = server.processes(process)
    answers = {_call(port, method) for port in listening_ports(psutil.Process(pid))}
    assert grpc.StatusCode.UNAUTHENTICATED in answers and None not in answers, answers


def test_no_process_of_rays_answers_http_without_the_token(server: RunningServer) -> None:
    """But for the replicas' own API, HAProxy, and Serve's proxy and router, which are no ports of Ray's."""
    ours = ("haproxy", "ServeReplica", "ProxyActor")
    titles: dict[int, str] = {}  # by port
    for process in family(server.pid):
        title = " ".join(command(process))
        if not any(name in title for name in ours):
            titles |= dict.fromkeys(listening_ports(process), title[-60:])
    with ThreadPoolExecutor(max(1, len(titles))) as pool:  # all at once: some that speak no HTTP never answer
        answers = [*zip(titles.values(), pool.map(_status, titles), strict=True)]
    statuses = {status for _, status in answers} - {None}
    assert statuses, "some speak HTTP: else this test sees nothing"
    assert statuses == {401}, answers


def _status(port: int) -> int | None:
    """Of an HTTP answer; None where there is none, as of a port that speaks gRPC."""
    try:
        return httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=20).status_code
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
        stream = client.completions.create(model="shout", prompt="hello", max_tokens=4, stream=True)
        assert len(list(stream)) >= 4
    with OpenAI(base_url=url, api_key="none", max_retries=0) as stranger, pytest.raises(openai.APIConnectionError):
        stranger.models.list()


def test_a_request_is_traced_from_the_router_to_its_last_step(
    port: int, authority: Authority, collector: Receiver
) -> None:
    trace_id = secrets.token_hex(16)
    before_s = time.time()
    answer = httpx.post(
        f"https://localhost:{port}/v1/completions",
        json={"model": "shout", "prompt": "hello", "max_tokens": 8, "ignore_eos": True},
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
