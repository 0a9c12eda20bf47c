"""A push by a process group to a replica of two ranks, which is one member of the group."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file

from lorafleet.client.admin import AdminClient
from lorafleet.client.weights_group import WeightsGroup
from tests.cluster.two_ranks import TwoRanks

pytestmark = pytest.mark.xdist_group("two_ranks")


def test_both_ranks_serve_what_one_member_has_received(two_ranks: TwoRanks, fleet: Callable[[str], Any]) -> None:
    """Without keys, SGLang's routes are open to those who may load adapters."""
    folder = fleet("llama3").adapters["all"]
    tensors = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    transport = httpx.HTTPTransport(verify=two_ranks.verify)
    with (
        httpx.Client(base_url=two_ranks.url, verify=two_ranks.verify, timeout=120) as http,
        AdminClient(two_ranks.url, transport=transport) as client,
        WeightsGroup(client, "localhost", backend="gloo") as group,
    ):
        with group.sending(dict(tensors)) as fields:
            entries: Any = fields["tensors"]
            lists = {f"{field}s": [entry[field] for entry in entries] for field in ("name", "dtype", "shape")}
            body = {"lora_name": "by-group", "config_dict": config, **lists}
            answer = http.post("/load_lora_adapter_from_distributed", json=body)
            assert answer.status_code == 200, answer.text
        tokens = [
            http.post(
                "/v1/completions",
                json={"model": name, "prompt": [7, 8, 9], "max_tokens": 6, "temperature": 0, "return_token_ids": True},
            ).json()["choices"][0]["token_ids"]
            for name in ("by-group", "all")
        ]
        assert tokens[0] == tokens[1]
        assert http.post("/unload_lora_adapter", json={"lora_name": "by-group"}).status_code == 200
