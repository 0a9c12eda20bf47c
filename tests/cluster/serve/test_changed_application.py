"""An application that is deployed with another option replaces its replicas one by one, and answers meanwhile."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import httpx
import pytest

from tests.cluster.harness import descendants_named
from tests.cluster.nodes import Nodes

pytestmark = pytest.mark.xdist_group("three_nodes")
NAMES = [f"rolled{i}" for i in range(4)]
CHANGED_LEN = 500


@pytest.fixture(scope="module")
def nodes(three_nodes: Nodes, tiny_model: Path) -> Nodes:
    """Two replicas, and adapters whose answers differ."""
    for i, name in enumerate(NAMES):
        shutil.copytree(tiny_model.parent / "a0", three_nodes.folder / name)
        config = json.loads((three_nodes.folder / name / "adapter_config.json").read_text())
        (three_nodes.folder / name / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 16 << i}))
    return three_nodes


async def ask(http: httpx.AsyncClient, name: str, num_tokens: int) -> str:
    """Returns the text of a stream that came to its end."""
    body = {"model": name, "prompt": "hello", "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        lines = [line async for line in answer.aiter_lines() if line]
    assert answer.status_code == 200, lines
    assert lines[-1] == "data: [DONE]", lines[-1]
    choices = [choice for line in lines[:-1] for choice in json.loads(line.removeprefix("data: "))["choices"]]
    assert choices[-1]["finish_reason"] == "length", choices[-1]
    return "".join(choice["text"] for choice in choices)


def model_len(nodes: Nodes) -> int:
    card: dict[str, int] = httpx.get(f"{nodes.url}/v1/models", timeout=60).json()["data"][0]
    return card["max_model_len"]


async def replace_under_load(nodes: Nodes) -> list[tuple[str, str]]:
    """Returns the names and answers of closed loops that began before the change and ended after it."""
    answers: list[tuple[str, str]] = []
    async with httpx.AsyncClient(base_url=nodes.url, timeout=300, trust_env=False) as http:
        answers += [(name, await ask(http, name, 32)) for name in NAMES]
        change = asyncio.create_task(asyncio.to_thread(nodes.order, f"change max_model_len {CHANGED_LEN}"))
        long = [asyncio.create_task(ask(http, name, 300)) for name in NAMES]

        async def loop(name: str) -> None:
            while not change.done():
                answers.append((name, await ask(http, name, 32)))

        await asyncio.gather(change, *long, *map(loop, NAMES))
        answers += [(name, await ask(http, name, 32)) for name in NAMES]
    return answers


def test_no_answer_is_lost_or_changed_while_replicas_with_another_option_take_over(nodes: Nodes) -> None:
    workers = set(descendants_named(nodes.process.pid, "WorkerActor"))
    assert len(workers) == 2 and model_len(nodes) != CHANGED_LEN
    answers = asyncio.run(replace_under_load(nodes))
    assert len(answers) > 3 * len(NAMES)
    assert len(set(answers)) == len(NAMES), "each adapter has one answer"
    assert len({text for _, text in answers}) > 1, "the adapters can be told apart"
    assert model_len(nodes) == CHANGED_LEN
    assert not workers & set(descendants_named(nodes.process.pid, "WorkerActor")), "no replica is of before"
