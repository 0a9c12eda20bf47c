"""A replica that Serve stops leaves its hot adapters to those that stay."""

from __future__ import annotations

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.harness import descendants_named
from tests.cluster.nodes import Nodes

pytestmark = pytest.mark.xdist_group("three_nodes")
NAMES = [f"hot{i}" for i in range(12)]


@pytest.fixture(scope="module")
def nodes(three_nodes: Nodes, tiny_model: Path) -> Nodes:
    """Two replicas, and adapters that are read when they are asked for."""
    for i, name in enumerate(NAMES):
        shutil.copytree(tiny_model.parent / "a0", three_nodes.folder / name)
        config = json.loads((three_nodes.folder / name / "adapter_config.json").read_text())
        (three_nodes.folder / name / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 8 + i}))
    return three_nodes


def held(nodes: Nodes) -> dict[str, set[str]]:
    """Adapters by replica, as the directory knows it."""
    found: dict[str, set[str]] = {}
    for replica, adapter, _ in nodes.order("residency"):
        found.setdefault(replica, set()).add(adapter)
    return found


def reads(nodes: Nodes) -> float:
    """Sequences that came before their adapter was in memory."""
    samples = [
        one
        for family in text_string_to_metric_families(httpx.get(f"{nodes.url}/metrics").text)
        for one in family.samples
    ]
    return sum(
        one.value for one in samples if one.name == "lorafleet_adapter_hits_total" and one.labels["tier"] == "disk"
    )


def stream(nodes: Nodes, name: str) -> str:
    """How an answer of seconds has ended."""
    body = {"model": name, "prompt": "hello", "max_tokens": 300, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{nodes.url}/v1/completions", json=body, timeout=300) as answer:
        chunks = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    return str(chunks[-1]["choices"][0]["finish_reason"])


def test_what_only_the_stopped_replica_held_is_at_the_other_before_it_is_asked_for(nodes: Nodes) -> None:
    with httpx.Client(base_url=nodes.url, timeout=300) as client:

        def ask(name: str) -> None:
            body = {"model": name, "prompt": "hello", "max_tokens": 32, "ignore_eos": True}
            assert client.post("/v1/completions", json=body).status_code == 200

        for name in NAMES * 2:
            ask(name)
        deadline = time.monotonic() + 120
        while len(before := held(nodes)) < 2 or len(set.union(*before.values())) < len(NAMES):
            assert time.monotonic() < deadline, before
            time.sleep(0.1)
        one, other = before.values()
        assert one - other and other - one, "whichever goes, it has something that the other lacks"
        with ThreadPoolExecutor(len(NAMES)) as pool:
            streams = [pool.submit(stream, nodes, name) for name in NAMES]
            time.sleep(0.3)
            nodes.order("scale 1")
            ends = [one.result() for one in streams]
        assert ends == ["length"] * len(NAMES), "what the stopped replica was answering it has answered"
        deadline = time.monotonic() + 300
        while len(descendants_named(nodes.process.pid, "WorkerActor")) > 1:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        while set(held(nodes)) - before.keys() or held(nodes).popitem()[1] != one | other:  # reports come every second
            assert time.monotonic() < deadline, held(nodes)
            time.sleep(0.1)
        read = reads(nodes)
        for name in NAMES:
            ask(name)
        assert reads(nodes) == read


def test_replicas_on_gpus_are_placed_whole_on_nodes_that_have_them_and_never_on_the_head(nodes: Nodes) -> None:
    """Of what configs/serve-cluster-folder.yaml asks for, two replicas; here since these nodes are up already."""
    assert nodes.order("place 1") == [[2], [2]]
    assert nodes.order("place 2") == [[2], [2]]
