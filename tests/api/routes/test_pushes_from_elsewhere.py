"""Pushes whose tensors come by a process group or out of shared memory, with a real engine and real receivers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save

import real_server
from lorafleet.client.admin import AdminClient, AsyncAdminClient
from lorafleet.client.weights_group import WeightsGroup
from real_server import ADMIN_KEY

ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
TENSORS = "/v1/adapters/elsewhere/tensors"


@pytest.fixture(scope="module")
def made(fleet: Callable[[str], Any]) -> Any:
    return fleet("llama3")


@pytest.fixture(scope="module")
def url(made: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("elsewhere")
    with real_server.running(folder, made.base, {}, {}, max_model_len=64, kv_cache_tokens=1024) as server:
        yield server.url


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, headers=ADMIN, timeout=120) as client:
        yield client


@pytest.fixture
def admin(url: str) -> Iterator[AdminClient]:
    with AdminClient(url, ADMIN_KEY) as client:
        yield client


@pytest.fixture
def group(admin: AdminClient) -> Iterator[WeightsGroup]:
    with WeightsGroup(admin, "127.0.0.1", backend="gloo") as group:
        yield group


def tensors_of(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    config = json.loads((folder / "adapter_config.json").read_text())
    return load_file(folder / "adapter_model.safetensors"), config


def greedy(http: httpx.Client, name: str) -> list[int]:
    body = {"model": name, "prompt": [7, 8, 9], "max_tokens": 5, "temperature": 0, "return_token_ids": True}
    tokens: list[int] = http.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]
    return tokens


def push_all_ways(admin: AdminClient, group: WeightsGroup, folder: Path) -> dict[str, str]:
    """Pushes the same tensors under three names, and returns their digests."""
    tensors, config = tensors_of(folder)
    return {
        "body": admin.push_tensors("body", save(tensors), config).digest,
        "group": admin.push_from_distributed("group", tensors, config, group).digest,
        "device": admin.push_from_device("device", tensors, config).digest,
    }


def test_the_same_tensors_are_one_content_whichever_way_they_come(
    http: httpx.Client, admin: AdminClient, group: WeightsGroup, made: Any
) -> None:
    for number, adapter in enumerate(("all", "qv"), 1):
        digests = push_all_ways(admin, group, made.adapters[adapter])
        assert len(set(digests.values())) == 1
        expected = made.reference.greedy([7, 8, 9], 5, made.adapters[adapter]).tokens
        for name in digests:
            assert greedy(http, name) == expected
            shown = admin.show(name)
            assert len(shown.versions) == number
            admin.verify(name)
    assert admin.show("group").versions[-1].source == "distributed"


async def test_the_awaited_client_pushes_from_elsewhere(url: str, group: WeightsGroup, made: Any) -> None:
    tensors, config = tensors_of(made.adapters["qv"])
    async with AsyncAdminClient(url, ADMIN_KEY) as client:
        by_group = await client.push_from_distributed("awaited", tensors, config, group, metadata={"step": "7"})
        by_device = await client.push_from_device("awaited", tensors, config)
        assert by_group == by_device
        assert (await client.show("awaited")).versions[0].metadata == {"step": "7"}
