"""The calls of RL frameworks' own clients, as examples/rl/ recorded them, and the fields that those clients read."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import real_server
from lorafleet.api.routes.unserved import unserved_routes
from real_server import ADMIN_KEY, BASE

ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
PROMPT = [7, 8, 9]


@pytest.fixture(scope="module")
def made(fleet: Callable[[str], Any]) -> Any:
    return fleet("llama3")


@pytest.fixture(scope="module")
def url(made: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("rl")
    config: dict[str, Any] = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    with real_server.running(folder, made.base, {}, config, max_model_len=512, kv_cache_tokens=4096) as server:
        yield server.url


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, headers=ADMIN, timeout=120) as client:
        yield client


def greedy(made: Any, adapter: str) -> list[int]:
    found: list[int] = made.reference.greedy(PROMPT, 4, made.adapters[adapter]).tokens
    return found


def as_push(folder: Path, name: str) -> dict[str, Any]:
    """Returns what verl's AsyncHttpServerAdapter sends, for two tensor-parallel ranks."""
    weights = (folder / "adapter_model.safetensors").read_bytes()
    config = json.loads((folder / "adapter_config.json").read_text())
    copies = [base64.b64encode(weights).decode()] * 2
    return {"lora_name": name, "config_dict": config, "serialized_named_tensors": copies}


def sglang_tokens(http: httpx.Client, name: str) -> list[int]:
    sampling = {"max_new_tokens": 4, "temperature": 0, "top_p": 1.0, "top_k": -1, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "lora_path": name, "return_logprob": True}
    answer = http.post("/generate", json=body).json()
    return [token for _, token, *_ in answer["meta_info"]["output_token_logprobs"]]


def test_verls_steps_over_http(http: httpx.Client, made: Any) -> None:
    name = "verl_actor_lora_name"
    assert http.get("/health_generate").status_code == 200
    for adapter in ("all", "qv", "qv"):  # The third has the bytes that the unload before it deletes.
        if any(model["id"] == name for model in http.get("/v1/models").json()["data"]):
            assert http.post("/unload_lora_adapter", json={"lora_name": name}).json()["success"]
        pushed = http.post("/load_lora_adapter_from_tensors", json=as_push(made.adapters[adapter], name))
        assert pushed.json() == {"success": True, "error_message": "", "loaded_adapters": {name: "__tensor__"}}
        assert http.get("/flush_cache").status_code == 200
        assert sglang_tokens(http, name) == greedy(made, adapter)
    assert http.post("/abort_request", json={"rid": "", "abort_all": True}).is_success


def test_a_pickle_and_an_unknown_format_are_named(http: httpx.Client, made: Any) -> None:
    push = as_push(made.adapters["all"], "pickled")
    pickled = push | {"serialized_named_tensors": [base64.b64encode(b"\x80\x04\x95" + bytes(64)).decode()]}
    error = http.post("/load_lora_adapter_from_tensors", json=pickled).json()["error"]
    assert error["code"] == "adapter_unsupported" and "safetensors.torch.save" in error["message"]
    other = http.post("/load_lora_adapter_from_tensors", json=push | {"load_format": "dtensor"})
    assert other.json()["error"]["param"] == "load_format"
    assert http.get("/v1/adapters/pickled").status_code == 404


def test_a_load_from_tensors_needs_the_option_or_the_key(url: str, made: Any) -> None:
    answer = httpx.post(f"{url}/load_lora_adapter_from_tensors", json=as_push(made.adapters["all"], "x"))
    assert answer.status_code == 403


@pytest.mark.parametrize("backend", ["sglang", "vllm"])
def test_areals_steps(http: httpx.Client, made: Any, backend: str) -> None:
    prefix, load = ("/", "/load_lora_adapter") if backend == "sglang" else ("/areal_", "/v1/load_lora_adapter")
    for version, adapter in ((1, "all"), (2, "qv")):
        name = f"{backend}-v{version}"
        assert http.post(f"{prefix}pause_generation", json={}).is_success
        assert http.post(load, json={"lora_name": name, "lora_path": str(made.adapters[adapter])}).is_success
        assert http.post(f"{prefix}continue_generation", json={}).is_success
        sampling = {"top_p": 1.0, "top_k": 100_000_000, "stop_token_ids": [], "temperature": 0.0, "ignore_eos": True}
        if backend == "sglang":
            more = {"max_new_tokens": 4, "skip_special_tokens": True, "frequency_penalty": 0.0}
            body = {"input_ids": PROMPT, "image_data": [], "return_logprob": True, "stream": False, "lora_path": name}
            meta = http.post("/generate", json=body | {"sampling_params": sampling | more}).json()["meta_info"]
            tokens, reason = [token for _, token, *_ in meta["output_token_logprobs"]], meta["finish_reason"]["type"]
        else:
            more = {"max_tokens": 4, "return_tokens_as_token_ids": True, "logprobs": 0, "use_beam_search": False}
            body = {"model": name, "prompt": PROMPT, "stream": False, "skip_special_tokens": True}
            [choice] = http.post("/v1/completions", json=body | sampling | more).json()["choices"]
            tokens = [int(token.split(":")[1]) for token in choice["logprobs"]["tokens"]]
            assert len(choice["logprobs"]["token_logprobs"]) == len(tokens)
            reason = choice["finish_reason"]
        assert (tokens, reason) == (greedy(made, adapter), "length")


def test_skyrls_steps(http: httpx.Client, made: Any) -> None:
    name = "skyrl-lora"
    for adapter in ("all", "qv"):
        assert http.post("/pause", params={"mode": "keep", "clear_cache": "false"}).json() == {"status": "paused"}
        load = {"lora_name": name, "lora_path": str(made.adapters[adapter])}
        assert http.post("/skyrl/v1/load_lora_adapter", json=load).is_success
        assert http.post("/resume").json() == {"status": "resumed"}
        assert http.post("/reset_prefix_cache", json={"reset_running_requests": False}).is_success
        sampling = {"n": 1, "logprobs": 0, "output_kind": 2, "prompt_logprobs": 0, "temperature": 0, "max_tokens": 4}
        body = {"sampling_params": sampling | {"ignore_eos": True}, "model": name, "token_ids": PROMPT}
        answer = http.post("/inference/v1/generate", json=body, headers={"X-Session-ID": "a"}).json()
        [choice] = answer["choices"]
        assert (choice["token_ids"], choice["finish_reason"]) == (greedy(made, adapter), "length")
        assert all(isinstance(entry["logprob"], float) for entry in choice["logprobs"]["content"])
        assert answer["prompt_logprobs"][0] is None
        assert all(str(token) in entry for token, entry in zip(PROMPT[1:], answer["prompt_logprobs"][1:], strict=True))
    assert http.post("/finish_session", params={"session_id": "a"}).status_code == 200
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": name}).is_success


def test_prime_rls_steps(http: httpx.Client, made: Any) -> None:
    for adapter in ("all", "qv"):
        load = {"lora_name": "prime", "lora_path": str(made.adapters[adapter])}
        assert http.post("/load_lora_adapter", json=load).is_success
        [card] = [model for model in http.get("/v1/models").json()["data"] if model["id"] == "prime"]
        assert card["max_model_len"] == 512
        sampling = {
            "max_tokens": 4,
            "temperature": 0,
            "stop_token_ids": [],
            "logprobs": 1,
            "skip_special_tokens": False,
        }
        body = {"model": "prime", "token_ids": PROMPT, "sampling_params": sampling | {"ignore_eos": True}}
        answer = http.post("/inference/v1/generate", json=body | {"cache_salt": adapter}).json()
        [choice] = answer["choices"]
        assert choice["token_ids"] == greedy(made, adapter)
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == [
            f"token_id:{token}" for token in choice["token_ids"]
        ]


def test_arts_names_have_their_step(http: httpx.Client, made: Any) -> None:
    load = {"lora_name": "art@0", "lora_path": str(made.adapters["all"]), "load_inplace": True}
    for _ in range(2):
        assert http.post("/v1/load_lora_adapter", json=load).is_success
    assert sglang_tokens(http, "art@0") == greedy(made, "all")
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "art@0"}).status_code == 200
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "art@0"}).status_code == 404


def test_sglangs_clients_read_the_model(http: httpx.Client) -> None:
    info = http.get("/get_model_info").json()
    assert info == http.get("/model_info").json()
    assert (info["served_model_name"], info["is_generation"]) == (BASE, True)


@pytest.mark.parametrize("path", [path for _, path, *_ in unserved_routes()])
def test_what_this_server_never_does_is_refused_with_the_remedy(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json={"any": "body"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "unsupported_route")
    assert path in error["message"] and len(error["message"]) > 100
