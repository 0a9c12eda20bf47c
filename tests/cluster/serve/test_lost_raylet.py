"""`lorafleet serve` when Ray's raylet has ended, and all workers with it."""

from __future__ import annotations

import time
from pathlib import Path

import httpx

from living import command, family, is_alive, kill
from tests.cluster.answers import logprobs
from tests.cluster.harness import START_S, serving
from tests.cluster.rays_turn import rays_turn


def test_a_server_whose_raylet_has_ended_begins_anew_as_the_same_process(tiny_model: Path, tmp_path: Path) -> None:
    arguments = ["--model", str(tiny_model), "--served-model-name", "base", "--kv-cache-tokens", "2048"]
    arguments += ["--lora-modules", f"kept={tiny_model.parent / 'a0'}"]
    log = tmp_path / "serve.log"
    with serving(arguments, log) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        before = logprobs(client, "kept")
        old = family(server.pid)
        with rays_turn():
            kill(one for one in old if any(part.endswith("raylet/raylet") for part in command(one)[:1]))
            deadline_s = time.monotonic() + START_S
            while log.read_text().count("\nready: ") < 2:
                assert time.monotonic() < deadline_s, log.read_text()
                time.sleep(0.2)
        assert logprobs(client, "kept") == before
        assert [command(one) for one in old if is_alive(one)] == []
