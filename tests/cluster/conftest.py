"""Provides a model small enough to be made on the spot, adapters for it, and a server that several files share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from file_server import FileServer
from tests.cluster.harness import ADMIN_KEY, SharedServer, serving


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a random two-layer Llama with a byte-level tokenizer; ../a0, ../a1, ../a2 are adapters for it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    from tiny_llama import write_tiny_llama

    folder = tmp_path_factory.mktemp("cluster")
    write_tiny_llama(folder / "model")
    for number in range(3):
        torch.manual_seed(number + 1)
        base = LlamaForCausalLM.from_pretrained(folder / "model")
        wanted = LoraConfig(
            r=4 * (number + 1), lora_alpha=64, target_modules=["q_proj", "v_proj"], init_lora_weights=False
        )
        get_peft_model(base, wanted).save_pretrained(folder / f"a{number}")
    return folder / "model"


@pytest.fixture(scope="session")
def shared_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    """Serves two replicas of `base` behind HAProxy.

    ref0, ref1 and ref2 are adapters of the server; a resolver finds `cold` in a folder, and `distant` is on a web
    server. A test file that uses it sets `pytestmark = pytest.mark.xdist_group("shared_server")`, and changes none of
    these adapters.
    """
    folder = tmp_path_factory.mktemp("shared")
    resolver_dir = folder / "resolved"
    shutil.copytree(tiny_model.parent / "a2", resolver_dir / "cold")
    web = FileServer()
    web.put("/distant", {path.name: path.read_bytes() for path in (tiny_model.parent / "a1").iterdir()})
    modules = [f"ref{i}={tiny_model.parent / f'a{i}'}" for i in range(3)]
    arguments = ["--model", str(tiny_model), "--served-model-name", "base", "--num-replicas", "2"]
    arguments += ["--kv-cache-tokens", "8192", "--max-loras", "4", "--lora-modules", *modules]
    arguments += ["--lora-resolver-dir", str(resolver_dir)]
    arguments += ["--lora-resolver-http", f"{web.url}/{{lora_name}}", "--lora-cache-dir", str(folder / "cache")]
    arguments += ["--admin-key", ADMIN_KEY, "--allow-runtime-lora-updating"]
    (folder / "prompts.jsonl").write_text('{"prompt": "one, two", "completion": ", three"}')
    (folder / "probes.json").write_text('{"sets": [{"model": "base", "prompts": "prompts.jsonl", "max_tokens": 4}]}')
    arguments += ["--quality-probes", str(folder / "probes.json")]
    with (
        serving(arguments, folder / "serve.log") as running,
        httpx.Client(base_url=running.url, timeout=120, headers={"authorization": f"Bearer {ADMIN_KEY}"}) as http,
    ):
        yield SharedServer(running, http, folder / "state", resolver_dir, web)
    web.close()
