"""Pushes by a process group to real servers: a trainer in this process, two replicas behind HAProxy, in theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save
from torch import Tensor

from lorafleet.client.admin import AdminClient
from lorafleet.client.weights_group import WeightsGroup
from tests.cluster.conftest import ADMIN_KEY, SharedServer

pytestmark = pytest.mark.xdist_group("shared_server")


def tensors_of(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    config = json.loads((folder / "adapter_config.json").read_text())
    return load_file(folder / "adapter_model.safetensors"), config


def answers_of(http: httpx.Client, name: str) -> set[tuple[int, ...]]:
    """Returns the different answers to one prompt, of both replicas as a rule."""
    body = {"model": name, "prompt": "one, two", "max_tokens": 6, "temperature": 0, "return_token_ids": True}
    found = [http.post("/v1/completions", json=body).json()["choices"][0]["token_ids"] for _ in range(6)]
    return {tuple(tokens) for tokens in found}


def test_every_push_reaches_the_replica_that_is_in_the_group(shared_server: SharedServer, tiny_model: Path) -> None:
    """The calls go to either replica, and only one has joined."""
    http = shared_server.http
    with AdminClient(str(http.base_url), ADMIN_KEY) as client:
        for round_, adapter in enumerate(("a0", "a1")):
            tensors, config = tensors_of(tiny_model.parent / adapter)
            ordinary = client.push_tensors("by-body", save(tensors), config)
            with WeightsGroup(client, "127.0.0.1", backend="gloo") as group:
                for _ in range(4):
                    pushed = client.push_from_distributed("by-group", tensors, config, group)
                    assert (pushed.version, pushed.digest) == (round_ + 1, ordinary.digest)
            assert client.push_from_device("by-device", tensors, config).digest == ordinary.digest
            [expected] = answers_of(http, "by-body")
            assert answers_of(http, "by-group") == answers_of(http, "by-device") == {expected}
        for name in ("by-body", "by-group", "by-device"):
            client.remove(name)
