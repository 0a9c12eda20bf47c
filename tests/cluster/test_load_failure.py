"""An adapter whose files are lost after it was registered, through the running server, under both policies."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx
import pytest

from tests.cluster.harness import running_server


@pytest.mark.parametrize("policy", ["error", "base"])
def test_a_lost_adapter_is_an_error_or_says_that_the_base_answered(tiny_model: Path, tmp_path: Path, policy: str):
    shutil.copytree(tiny_model.parent / "a0", tmp_path / "lost")
    arguments = ["--model", str(tiny_model), "--served-model-name", "base", "--on-lora-load-failure", policy]
    arguments += ["--lora-modules", f"lost={tmp_path / 'lost'}", f"kept={tiny_model.parent / 'a1'}"]
    arguments += ["--max-loras", "1", "--max-cpu-loras", "1", "--kv-cache-tokens", "2048"]
    with (
        running_server(arguments, tmp_path / "serve.log") as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):

        def ask(model: str, **fields: object) -> httpx.Response:
            body = {"model": model, "prompt": "hello", "max_tokens": 5, "temperature": 0}
            return client.post("/v1/completions", json=body | fields)

        base, kept, lost = ask("base").json(), ask("kept").json(), ask("lost").json()
        assert lost["choices"] != base["choices"]
        assert ask("kept").status_code == 200  # takes the only slot and the only place in memory
        shutil.rmtree(tmp_path / "lost")
        answer = ask("lost")
        if policy == "error":
            assert 400 <= answer.status_code < 500
            assert "lost" in answer.json()["error"]["message"]
        else:
            assert answer.json()["choices"] == base["choices"]
            assert answer.json()["model"] == "base"
            assert answer.json()["lora_fallback"]["requested"] == "lost"
            assert answer.headers["x-lorafleet-fallback"] == "base"
            assert '"lora_fallback"' in ask("lost", stream=True).text
        assert ask("kept").json()["choices"] == kept["choices"]
