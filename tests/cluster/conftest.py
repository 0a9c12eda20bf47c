"""Provides a model small enough to be made on the spot, adapters for it, and a server that several files share."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from file_server import FileServer
from otlp_receiver import receiver
from tests.cluster.certificates import Authority
from tests.cluster.harness import ADMIN_KEY, SharedServer, serving
from tests.cluster.last_tests import end_unused, until_last_test
from tests.cluster.two_ranks import TwoRanks, arguments_of_two_ranks


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Function) -> Iterator[None]:
    yield
    end_unused(item)


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
def shared_server(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedServer]:
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
    with until_last_test(request) as stack:
        running = stack.enter_context(serving(arguments, folder / "serve.log"))
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        http = stack.enter_context(httpx.Client(base_url=running.url, timeout=120, headers=headers))
        yield SharedServer(running, http, folder / "state", resolver_dir, web)
    web.close()


@pytest.fixture(scope="session")
def two_ranks(
    request: pytest.FixtureRequest, fleet: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TwoRanks]:
    """Serves `tiny` on one replica of two ranks, behind TLS, with traces for a collector.

    A test file that uses it sets `pytestmark = pytest.mark.xdist_group("two_ranks")`.
    """
    folder = tmp_path_factory.mktemp("ranks")
    with until_last_test(request) as stack:
        authority, collector = Authority.make(folder / "ca"), stack.enter_context(receiver())
        cert, key = authority.issue("server", "localhost")
        arguments = [*arguments_of_two_ranks(fleet("llama3"), "cpu"), "--ssl-certfile", str(cert)]
        arguments += ["--ssl-keyfile", str(key), "--otlp-traces-endpoint", collector.endpoint]
        arguments += ["--otlp-traces-ratio", "0"]
        running = stack.enter_context(serving(arguments, folder / "serve.log"))
        url = running.url.replace("http://127.0.0.1", "https://localhost")
        yield TwoRanks(url, running.pid, authority, collector)
