"""An adapter whose files are lost after it was registered, where the base may answer in its place; that it is an error
otherwise is test_bad_adapters.py's."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx

from tests.cluster.harness import running_server


def test_of_a_lost_adapter_the_answer_says_that_it_is_the_bases(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model.parent / "a0", tmp_path / "lost")
    arguments = ["--model", str(tiny_model), "--served-model-name", "base", "--on-lora-load-failure", "base"]
    arguments += ["--lora-modules", f"lost={tmp_path / 'lost'}", f"kept={tiny_model.parent / 'a1'}"]
    arguments += ["--max-loras", "1", "--max-cpu-loras", "1", "--kv-cache-tokens", "2048"]
    with (
        running_server(arguments, tmp_path / "serve.log") as url,
        httpx.Client(base_url=url, timeout=300) as client,
    ):

        def ask(model: str, **fields: object) -> httpx.Response:
            body = {"model": model, "prompt": "hello", "max_tokens": 5, "temperature": 0}
            return client.post("/v1/completions", json=body | fields)

        base, kept, lost = ask("base").json(), ask("kept").json(), ask("lost").json()
        assert lost["choices"] != base["choices"]
        assert ask("kept").status_code == 200  # takes the only slot and the only place in memory
        shutil.rmtree(tmp_path / "lost")
        answer = ask("lost")
        assert answer.json()["choices"] == base["choices"]
        assert answer.json()["model"] == "base"
        assert answer.json()["lora_fallback"]["requested"] == "lost"
        assert answer.headers["x-lorafleet-fallback"] == "base"
        assert '"lora_fallback"' in ask("lost", stream=True).text
        assert ask("kept").json()["choices"] == kept["choices"]
