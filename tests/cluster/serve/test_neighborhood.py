"""Two replicas on two nodes of a real Ray, each with a cache of its own, and a web server that has their adapters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from file_server import FileServer
from lorafleet.protocol.adapter_formats.adapter_files import folder_digest
from tests.cluster.harness import START_S
from tests.cluster.nodes import Nodes, running_nodes

pytestmark = [
    pytest.mark.xdist_group("own_server"),
    pytest.mark.timeout(900),
]
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def source() -> Iterator[FileServer]:
    made = FileServer()
    yield made
    made.close()


@pytest.fixture(scope="module")
def nodes(tiny_model: Path, source: FileServer) -> Iterator[Nodes]:
    """A replica takes most of a node, and the head has no CPU for one. Requests go to the replicas in turn."""
    arguments = {
        "model": str(tiny_model),
        "served_model_name": "base",
        "num_replicas": 2,
        "device": "cpu",
        "num_cpus": 1.5,
        "cpu_threads": 1,
        "max_loras": 2,
        "max_cpu_loras": 4,
        "kv_cache_tokens": 2048,
        "routing": "round-robin",
        "lora_resolver_http": {"uri": f"{source.url}/{{lora_name}}"},
    }
    with running_nodes(arguments, tiny_model.parent, head_cpus=0) as running:
        yield running


def ask(nodes: Nodes, adapter: str) -> list[float]:
    body = {"model": adapter, "prompt": "hello", "max_tokens": 4, "temperature": 0, "logprobs": 1}
    response = httpx.post(f"{nodes.url}/v1/completions", json=body, timeout=120)
    response.raise_for_status()
    logprobs: list[float] = response.json()["choices"][0]["logprobs"]["token_logprobs"]
    return logprobs


def count(nodes: Nodes, series: str, **labels: str) -> float:
    families = text_string_to_metric_families(httpx.get(f"{nodes.url}/metrics", timeout=60).text)
    samples = [sample for family in families for sample in family.samples if sample.name == series]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def outcomes(nodes: Nodes, outcome: str) -> float:
    """Returns how often a front or a worker has seen this outcome. Both fetch, whichever needs the files first."""
    by_front = count(nodes, "lorafleet_adapter_fetches_total", source="neighbor", outcome=outcome)
    return by_front + count(nodes, "lorafleet_engine_lora_neighbor_fetches_total", outcome=outcome)


def caches_with(nodes: Nodes, digest: str) -> list[Path]:
    return [path for path in nodes.run_dir.glob(f"cache?/lorafleet/adapters/{digest}") if path.is_dir()]


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def until_held(nodes: Nodes, digest: str) -> None:
    """Waits until the directory knows that a replica holds the adapter."""
    until(lambda: any(held == digest for _, held, _ in nodes.order("residency")))


def put(source: FileServer, folder: Path, name: str) -> str:
    source.put(f"/{name}", {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()})
    return folder_digest(folder)


def test_an_adapter_whose_source_is_gone_comes_from_the_other_node(
    nodes: Nodes, source: FileServer, tiny_model: Path
) -> None:
    digest = put(source, tiny_model.parent / "a0", "near")
    first = ask(nodes, "near")
    until_held(nodes, digest)
    assert len(caches_with(nodes, digest)) == 1
    source.files.clear()
    num_requests = len(source.requests)
    assert [ask(nodes, "near") for _ in range(4)] == [first] * 4
    assert ask(nodes, "base") != first
    assert len(caches_with(nodes, digest)) == 2
    assert len(source.requests) == num_requests
    until(lambda: outcomes(nodes, "fetched") == 1)
    assert count(nodes, "lorafleet_neighbor_sends_total", outcome="sent") == 1
    assert count(nodes, "lorafleet_neighbor_sent_bytes_total") > 0


def test_bytes_that_the_other_node_changed_are_refused(nodes: Nodes, source: FileServer, tiny_model: Path) -> None:
    digest = put(source, tiny_model.parent / "a1", "changed")
    first = ask(nodes, "changed")
    until_held(nodes, digest)
    [folder] = caches_with(nodes, digest)
    weights = bytearray((folder / WEIGHTS).read_bytes())
    weights[-1] ^= 1
    (folder / WEIGHTS).write_bytes(weights)
    assert [ask(nodes, "changed") for _ in range(4)] == [first] * 4
    assert len(caches_with(nodes, digest)) == 2
    [other] = [path for path in caches_with(nodes, digest) if path != folder]
    assert folder_digest(other) == digest
    until(lambda: outcomes(nodes, "damaged") == 1)
