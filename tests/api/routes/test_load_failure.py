"""An adapter whose files are lost after it was registered, over HTTP, under both policies."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import real_server
from lorafleet.protocol.lora_config import LoRAConfig
from real_server import BASE

ONE_AT_A_TIME = LoRAConfig(max_loras=1, max_cpu_loras=1)


@pytest.mark.parametrize("policy", ["error", "base"])
def test_a_lost_adapter_is_an_error_or_says_that_the_base_answered(
    fleet: Callable[[str], Any], tmp_path: Path, policy: str
) -> None:
    made = fleet("llama3")
    shutil.copytree(made.adapters["all"], tmp_path / "lost")
    engine: dict[str, Any] = {"kv_cache_tokens": 2048, "on_lora_load_failure": policy}
    with (
        real_server.running(tmp_path, made.base, {}, {}, lora=ONE_AT_A_TIME, **engine) as server,
        httpx.Client(base_url=server.url, timeout=300) as client,
    ):
        server.seed("lost", tmp_path / "lost")
        server.seed("kept", made.adapters["qv"])

        def ask(model: str, **fields: object) -> httpx.Response:
            body = {"model": model, "prompt": "hello", "max_tokens": 5, "temperature": 0}
            return client.post("/v1/completions", json=body | fields)

        base, kept, lost = ask(BASE).json(), ask("kept").json(), ask("lost").json()
        assert lost["choices"] != base["choices"]
        assert ask("kept").status_code == 200  # takes the only slot and the only place in memory
        shutil.rmtree(tmp_path / "lost")
        answer = ask("lost")
        if policy == "error":
            assert 400 <= answer.status_code < 500
            assert "lost" in answer.json()["error"]["message"]
        else:
            assert answer.json()["choices"] == base["choices"]
            assert answer.json()["model"] == BASE
            assert answer.json()["lora_fallback"]["requested"] == "lost"
            assert answer.headers["x-lorafleet-fallback"] == "base"
            assert '"lora_fallback"' in ask("lost", stream=True).text
        assert ask("kept").json()["choices"] == kept["choices"]
