"""Trainers' routes, pushes from memory, and the versions in answers, over HTTP and with a real engine."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import real_server
from lorafleet.client.admin import AdminClient
from lorafleet.client.client_errors import APIStatusError
from lorafleet.client.tensor_packing import pack_tensors
from real_server import ADMIN_KEY, BASE
from tiny_models import make_adapter, make_model

ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
LONG = {"prompt": [7, 8, 9], "max_tokens": 400, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def made(fleet: Callable[[str], Any]) -> Any:
    return fleet("llama3")


@pytest.fixture(scope="module")
def url(made: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("trainers")
    config: dict[str, Any] = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    with real_server.running(folder, made.base, {}, config, max_model_len=512, kv_cache_tokens=4096) as server:
        yield server.url


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, headers=ADMIN, timeout=120) as client:
        yield client
        assert client.post("/wake_up").is_success
        assert client.post("/resume").is_success


@pytest.fixture
def admin(url: str) -> Iterator[AdminClient]:
    with AdminClient(url, ADMIN_KEY) as client:
        yield client


def weights_of(folder: Path) -> tuple[bytes, dict[str, Any]]:
    config = json.loads((folder / "adapter_config.json").read_text())
    return (folder / "adapter_model.safetensors").read_bytes(), config


def in_background(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


# -- who may call, and what vLLM's and SGLang's clients read ----------------------------------------------------------

CLOSED = [
    ("GET", "/server_info"),
    ("GET", "/get_world_size"),
    ("GET", "/is_paused"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
    ("GET", "/is_sleeping"),
    ("POST", "/release_memory_occupation"),
    ("POST", "/resume_memory_occupation"),
    ("POST", "/pause_generation"),
    ("POST", "/continue_generation"),
    ("POST", "/abort_request"),
    ("POST", "/flush_cache"),
    ("GET", "/flush_cache"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/load_lora_adapter"),
    ("POST", "/unload_lora_adapter"),
    ("POST", "/v1/load_lora_adapter"),
]


@pytest.mark.parametrize(("method", "path"), CLOSED, ids=[f"{method} {path}" for method, path in CLOSED])
def test_without_the_option_or_the_key_each_route_is_closed(url: str, method: str, path: str) -> None:
    body = {"rid": "x"} if path == "/abort_request" else {"lora_name": "x", "lora_path": "/x"}
    answer = httpx.request(method, url + path, json=body if "adapter" in path or "abort" in path else None)
    assert answer.status_code == 403
    assert "--allow-runtime-lora-updating" in answer.json()["error"]["message"]


def test_server_info_has_what_trl_reads(http: httpx.Client) -> None:
    config = http.get("/server_info", params={"config_format": "json"}).json()["vllm_config"]
    assert config["lora_config"]["max_lora_rank"] == 64 and config["lora_config"]["max_loras"] == 2
    assert config["parallel_config"]["data_parallel_size"] == 1
    assert config["model_config"]["dtype"] == "torch.float32"
    assert isinstance(http.get("/server_info").json()["vllm_config"], str)
    assert http.get("/get_world_size").json() == {"world_size": 1}
    assert http.get("/liveness").status_code == 200


def test_a_pause_holds_requests_until_the_resume(http: httpx.Client) -> None:
    assert http.post("/pause", params={"mode": "keep"}).json() == {"status": "paused"}
    assert http.get("/is_paused").json() == {"is_paused": True}
    answers: list[httpx.Response] = []
    body = {"model": BASE, "prompt": "a", "max_tokens": 2}
    asking = in_background(lambda: answers.append(http.post("/v1/completions", json=body)))
    assert http.post("/flush_cache").text == "Cache flushed.\n"
    assert http.post("/reset_prefix_cache").is_success
    assert not answers
    assert http.post("/continue_generation").json()["status"] == "ok"
    asking.join()
    assert answers[0].status_code == 200
    assert http.get("/is_paused").json() == {"is_paused": False}
    assert http.post("/pause_generation", json={"mode": "in_place"}).json()["status"] == "ok"
    assert http.get("/is_paused").json() == {"is_paused": True}
    assert http.post("/pause", params={"mode": "later"}).status_code == 400


@pytest.mark.parametrize("how", ["pause", "rid", "all"])
def test_aborted_requests_end_with_that_reason(http: httpx.Client, how: str) -> None:
    http.post("/pause", params={"mode": "keep"})
    answers: list[Any] = []
    body = {"text": "a", "rid": "mine", "sampling_params": {"max_new_tokens": 4}}
    asking = in_background(lambda: answers.append(http.post("/generate", json=body).json()))
    while asking.is_alive():  # The request may not have reached the engine before the first order.
        if how == "pause":
            assert http.post("/pause").is_success
        else:
            assert http.post("/abort_request", json={"rid": "other"}).is_success
            named: dict[str, object] = {"rid": "mine"} if how == "rid" else {"abort_all": True}
            assert http.post("/abort_request", json=named).is_success
        asking.join(0.05)
    assert answers[0]["meta_info"]["finish_reason"] == {"type": "abort"}
    assert http.post("/abort_request", json={}).json()["error"]["param"] == "rid"


def test_a_server_gives_its_memory_back_and_answers_as_before(
    http: httpx.Client, admin: AdminClient, made: Any
) -> None:
    body = {"model": BASE, "prompt": [7, 8, 9], "max_tokens": 5, "temperature": 0, "return_token_ids": True}
    expected = made.reference.greedy([7, 8, 9], 5).tokens
    assert http.post("/sleep").json() == {"status": "asleep"}
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert http.get("/health").status_code == 200
    assert "lorafleet_engine_sleeping{" in http.get("/metrics").text
    refused = http.post("/v1/completions", json=body, headers={"x-queue-timeout-seconds": "0.2"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_timeout")
    answers: list[httpx.Response] = []
    asking = in_background(lambda: answers.append(http.post("/v1/completions", json=body)))
    admin.push_tensors("asleep", *weights_of(made.adapters["all"]))
    woken = http.post("/wake_up", params={"tags": "weights"}).json()
    assert woken == {"status": "awake", "base_changed": False, "base_digest": woken["base_digest"]}
    assert len(woken["base_digest"]) == 32
    assert admin.is_sleeping().is_sleeping and not answers
    assert http.post("/wake_up", params={"tags": ["weights", "kv_cache"]}).is_success
    asking.join()
    assert answers[0].json()["choices"][0]["token_ids"] == expected
    assert not admin.is_sleeping().is_sleeping
    assert admin.sleep(level=2, mode="keep").status == "asleep"
    assert admin.wake_up(["kv_cache"]).status == "awake" and admin.is_sleeping().is_sleeping
    assert not admin.wake_up().base_changed
    tokens = http.post("/v1/completions", json=body | {"model": "asleep"}).json()["choices"][0]["token_ids"]
    assert tokens == made.reference.greedy([7, 8, 9], 5, made.adapters["all"]).tokens


def test_sglangs_routes_give_parts_of_the_memory_back(http: httpx.Client) -> None:
    tags = ["kv_cache", "cuda_graph"]
    assert http.post("/release_memory_occupation", json={"tags": tags}).json()["status"] == "ok"
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert http.post("/release_memory_occupation").is_success
    assert http.post("/resume_memory_occupation", json={"tags": ["weights"]}).is_success
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert http.post("/resume_memory_occupation", json={"tags": tags}).is_success
    assert http.get("/is_sleeping").json() == {"is_sleeping": False}


@pytest.mark.parametrize(
    ("path", "sent", "param"),
    [
        ("/sleep", {"params": {"level": 0}}, "level"),
        ("/sleep", {"params": {"mode": "later"}}, "mode"),
        ("/wake_up", {"params": {"tags": ["weights", "scheduling"]}}, "tags"),
        ("/release_memory_occupation", {"json": {"tags": ["cuda_graph"]}}, "tags"),
        ("/release_memory_occupation", {"json": {"tags": ["all"]}}, "tags"),
    ],
)
def test_parts_and_levels_that_do_not_exist_are_refused(
    http: httpx.Client, path: str, sent: dict[str, Any], param: str
) -> None:
    answer = http.post(path, **sent)
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith(param)
    assert http.get("/is_sleeping").json() == {"is_sleeping": False}


def test_sglangs_routes_load_replace_and_unload(http: httpx.Client, made: Any) -> None:
    body = {"lora_name": "steps", "lora_path": str(made.adapters["all"])}
    assert http.post("/load_lora_adapter", json=body).json()["loaded_adapters"] == {"steps": body["lora_path"]}
    # The server reads its own copy, whose path is not what the owner gave.
    assert http.get("/v1/models/steps").json()["root"] == body["lora_path"]
    assert http.post("/load_lora_adapter", json=body | {"load_inplace": False}).status_code == 400
    body["lora_path"] = str(made.adapters["qv"])
    assert http.post("/load_lora_adapter", json=body).json()["success"]
    assert len(http.get("/v1/adapters/steps").json()["versions"]) == 2
    assert http.post("/load_lora_adapter", json=body | {"pinned": True}).json()["error"]["param"] == "pinned"
    assert http.post("/unload_lora_adapter", json={"lora_name": "steps"}).json()["success"]
    assert http.post("/v1/completions", json={"model": "steps", "prompt": "a"}).status_code == 404


# -- tokens in, tokens out --------------------------------------------------------------------------------------------


def test_a_rendered_chat_is_generated_as_the_chat_itself(http: httpx.Client) -> None:
    chat = {
        "model": BASE,
        "messages": [{"role": "user", "content": "one two"}],
        "max_tokens": 6,
        "temperature": 0,
        "logprobs": True,
    }
    direct = http.post("/v1/chat/completions", json=chat | {"return_token_ids": True}).json()
    rendered = http.post("/v1/chat/completions/render", json=chat).json()
    assert rendered["token_ids"] == direct["prompt_token_ids"]
    whole = http.post("/inference/v1/generate", json=rendered).json()
    [choice] = whole["choices"]
    assert choice["token_ids"] == direct["choices"][0]["token_ids"]
    assert choice["finish_reason"] == direct["choices"][0]["finish_reason"]
    found = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert found == [entry["logprob"] for entry in direct["choices"][0]["logprobs"]["content"]]
    streamed = http.post("/inference/v1/generate", json=rendered | {"stream": True}).text.split("\n\n")
    assert streamed[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in streamed[:-2]]
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == choice["token_ids"]


def test_generated_tokens_have_no_bad_words(http: httpx.Client) -> None:
    def token_ids(**more: object) -> list[int]:
        sampling = {"max_tokens": 4, "ignore_eos": True, "temperature": 0, **more}
        answer = http.post("/inference/v1/generate", json={"token_ids": [7, 8, 9], "sampling_params": sampling})
        assert answer.status_code == 200, answer.text
        found: list[int] = answer.json()["choices"][0]["token_ids"]
        return found

    first = token_ids()[0]
    word = http.post("/detokenize", json={"model": BASE, "tokens": [first]}).json()["prompt"]
    assert first not in token_ids(bad_words=[word])


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"token_ids": "text"}, "token_ids"),
        ({"token_ids": [[1]]}, "token_ids"),
        ({"token_ids": [10**6]}, "token_ids"),
        ({"sampling_params": {"guided_json": {}}}, "sampling_params.guided_json"),
        ({"features": {}}, "features"),
        ({"stream": True, "sampling_params": {"prompt_logprobs": 1}}, "sampling_params.prompt_logprobs"),
    ],
    ids=["text", "nested", "vocabulary", "format", "features", "streamed"],
)
def test_what_cannot_be_generated_is_named(http: httpx.Client, change: dict[str, Any], param: str) -> None:
    body = {"token_ids": [5, 6], "sampling_params": {}} | change
    answer = http.post("/inference/v1/generate", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


# -- pushes as TRL makes them -----------------------------------------------------------------------------------------


def push_as_trl(http: httpx.Client, version: int, folder: Path, max_staleness: int) -> None:
    """Sends the calls of `AsyncGRPOTrainer._sync_weight_lora` in TRL 1.16. Each step's adapter has its own name."""
    assert http.post("/pause", params={"mode": "keep"}).status_code == 200
    body = {"lora_name": f"trl-policy-v{version}", "lora_path": str(folder), "load_inplace": False}
    assert http.post("/v1/load_lora_adapter", json=body).status_code == 200
    assert http.post("/resume").status_code == 200
    stale = version - (max_staleness + 1)
    if stale > 0:
        answer = http.post("/v1/unload_lora_adapter", json={"lora_name": f"trl-policy-v{stale}"})
        assert answer.status_code == 200


def rollout(version: int, seed: int = 2**63 - 1) -> dict[str, object]:
    """Returns the body of `_AsyncRolloutLoop._generate_one_turn` in TRL 1.16, and asks for the versions besides."""
    body: dict[str, object] = {"model": f"trl-policy-v{version}", "prompt": [7, 8, 9], "max_tokens": 6, "n": 1}
    body |= {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "seed": seed}
    return body | {"return_token_ids": True, "logprobs": 0, "return_weight_versions": True}


def forget_policies(http: httpx.Client) -> None:
    for model in http.get("/v1/models").json()["data"]:
        if model["id"].startswith("trl-policy-"):
            http.post("/v1/unload_lora_adapter", json={"lora_name": model["id"]})


def test_answers_have_the_weights_that_trl_pushed_at_each_step(http: httpx.Client, made: Any, tmp_path: Path) -> None:
    """Rollouts run through all pushes. The reference computes their logprobs with the files of the step they name."""
    folders = {step: make_adapter(tmp_path / f"v{step}", made.base, seed=40 + step) for step in range(1, 6)}
    pushed, answers, trained = [0], list[tuple[int, httpx.Response]](), threading.Event()

    def sample() -> None:
        seed = 0
        while not trained.is_set():
            version, seed = pushed[0], seed + 1
            answers.append((version, http.post("/v1/completions", json=rollout(version, seed))))

    sampling: threading.Thread | None = None
    digests: dict[int, str] = {}
    try:
        for step, folder in folders.items():
            push_as_trl(http, step, folder, max_staleness=1)
            [version] = http.get(f"/v1/adapters/trl-policy-v{step}").json()["versions"]
            digests[step], pushed[0], begun = version["digest"], step, len(answers)
            sampling = sampling or in_background(sample)
            while len(answers) < begun + 3 and sampling.is_alive():  # So that the last of them names this step.
                sampling.join(0.01)
    finally:
        trained.set()
        if sampling is not None:
            sampling.join()
        forget_policies(http)
    assert len(set(digests.values())) == len(folders)
    assert {version for version, _ in answers} == set(folders)
    for version, answer in answers:
        assert answer.status_code == 200, answer.text
        [choice] = answer.json()["choices"]
        tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        span = {"version": "1", "digest": digests[version], "start": 0, "end": len(tokens)}
        assert choice["weight_versions"] == [span]
        assert logprobs == pytest.approx(made.reference.logprobs([7, 8, 9, *tokens], folders[version])[2:], abs=1e-3)


def test_a_version_unloaded_after_a_push_still_ends_its_answers(http: httpx.Client, made: Any) -> None:
    """A rollout that came during the pause has not started when TRL unloads the version that it names."""
    push_as_trl(http, 1, made.adapters["all"], max_staleness=0)
    http.post("/pause", params={"mode": "keep"})
    answers: list[httpx.Response] = []
    asking = in_background(lambda: answers.append(http.post("/v1/completions", json=rollout(1))))
    while 'vllm:num_requests_waiting{replica="r0"} 1.0' not in http.get("/metrics").text and asking.is_alive():
        asking.join(0.01)
    push_as_trl(http, 2, made.adapters["qv"], max_staleness=0)
    asking.join()
    assert answers[0].status_code == 200, answers[0].text
    [choice] = answers[0].json()["choices"]
    expected = made.reference.logprobs([7, 8, 9, *choice["token_ids"]], made.adapters["all"])[2:]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-3)
    assert http.post("/v1/completions", json=rollout(1)).status_code == 404
    forget_policies(http)


def test_the_token_that_ends_an_answer_has_its_logprob(http: httpx.Client) -> None:
    """TRL trains on it, and refuses an answer whose tokens and logprobs differ in number."""
    body = rollout(1) | {"model": BASE, "max_tokens": 400, "logit_bias": {"1": 100}, "return_weight_versions": False}
    [choice] = http.post("/v1/completions", json=body).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"]) == 1


# -- pushes from memory, and which weights answered -------------------------------------------------------------------


def test_tensors_from_memory_are_served_as_their_files_are(http: httpx.Client, admin: AdminClient, made: Any) -> None:
    weights, config = weights_of(made.adapters["all"])
    first = admin.push_tensors("mem", weights, config)
    assert first.version == 1
    body = {"model": "mem", "prompt": [7, 8, 9], "max_tokens": 5, "temperature": 0, "return_token_ids": True}
    tokens = http.post("/v1/completions", json=body).json()["choices"][0]["token_ids"]
    assert tokens == made.reference.greedy([7, 8, 9], 5, made.adapters["all"]).tokens
    second = admin.push_tensors("mem", *weights_of(made.adapters["qv"]))
    assert (second.version, admin.show("mem").versions[-1].digest) == (2, second.digest)
    assert admin.push_tensors("mem", weights, config) == first  # The same bytes keep their number.
    admin.verify("mem")


@pytest.mark.parametrize("fault", ["checksum", "missing", "truncated", "more", "pickle", "empty"])
def test_a_damaged_push_changes_nothing(http: httpx.Client, made: Any, fault: str) -> None:
    head, weights = pack_tensors(*weights_of(made.adapters["all"]))
    body = bytearray(head + weights)
    match fault:
        case "checksum":
            body[-1] ^= 1
        case "missing":
            fields = json.loads(head[8:])
            fields["sha256"].popitem()
            text = json.dumps(fields).encode()
            body = bytearray(len(text).to_bytes(8, "little") + text + weights)
        case "truncated":
            del body[-1:]
        case "more":
            body += b"\0"
        case "pickle":
            body = bytearray(b"\x80\x04\x95" * 100)
        case "empty":
            body.clear()
    answer = http.put("/v1/adapters/broken/tensors", content=bytes(body))
    assert answer.status_code == 400, answer.text
    assert http.get("/v1/adapters/broken").status_code == 404


def test_a_push_needs_the_key_and_a_length(url: str, http: httpx.Client) -> None:
    assert httpx.put(f"{url}/v1/adapters/x/tensors", content=b"x").status_code == 401
    unsized = http.put("/v1/adapters/x/tensors", content=iter([b"x"]))
    assert unsized.status_code == 400 and "Content-Length" in unsized.json()["error"]["message"]


def test_answers_name_their_weights_and_requests_demand_them(http: httpx.Client, admin: AdminClient, made: Any) -> None:
    first = admin.push_tensors("policy", *weights_of(made.adapters["all"]))
    span = {"version": "1", "digest": first.digest, "start": 0, "end": 3}
    asked = {"model": "policy", "max_tokens": 3, "ignore_eos": True, "return_weight_versions": True}
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", chat)):
        answer = http.post(path, json=asked | body)
        assert answer.json()["choices"][0]["weight_versions"] == [span]
        assert answer.headers["x-lorafleet-version"] == "1"
        assert answer.headers["x-lorafleet-digest"] == first.digest
        events = http.post(path, json=asked | body | {"stream": True}).text.split("\n\n")[:-2]
        last = json.loads(events[-1].removeprefix("data: "))
        assert last["choices"][0]["weight_versions"] == [span]
    base = http.post("/v1/completions", json=asked | {"prompt": "a", "model": BASE}).json()
    assert base["choices"][0]["weight_versions"] == [span | {"version": None, "digest": None}]
    plain = http.post("/v1/completions", json={"model": "policy", "prompt": "a"}).json()
    assert "weight_versions" not in plain["choices"][0]
    for demand in ({"weight_version": 1}, {"min_weight_version": 1}):
        assert http.post("/v1/completions", json=asked | {"prompt": "a"} | demand).status_code == 200
    for demand in ({"weight_version": 2}, {"min_weight_version": 2}):
        refused = http.post("/v1/completions", json=asked | {"prompt": "a"} | demand)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "weight_version_mismatch")
        assert refused.headers["x-lorafleet-version"] == "1"
    neither = http.post("/v1/completions", json={"model": BASE, "prompt": "a", "weight_version": 1})
    assert neither.status_code == 400


@pytest.mark.parametrize("in_flight", ["finish", "switch", "abort"])
def test_a_push_does_to_running_answers_what_it_says(
    http: httpx.Client, admin: AdminClient, made: Any, in_flight: Any
) -> None:
    """The engine is paused during the push, so that the answer cannot end before it."""
    name = f"run-{in_flight}"
    old = admin.push_tensors(name, *weights_of(made.adapters["all"]))
    body = LONG | {"model": name, "stream": True, "return_token_ids": True, "return_weight_versions": True}
    with http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        chunks = [json.loads(next(lines).removeprefix("data: "))]
        http.post("/pause", params={"mode": "keep"})
        new = admin.push_tensors(name, *weights_of(made.adapters["qv"]), in_flight=in_flight)
        http.post("/resume")
        chunks += [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    choices = [chunk["choices"][0] for chunk in chunks]
    tokens, spans = [token for choice in choices for token in choice["token_ids"]], choices[-1]["weight_versions"]
    assert choices[-1]["finish_reason"] == ("abort" if in_flight == "abort" else "length")
    assert spans[0]["digest"] == old.digest and spans[-1]["end"] == len(tokens)
    if in_flight == "switch":
        assert [span["digest"] for span in spans] == [old.digest, new.digest]
        assert spans[0]["end"] == spans[1]["start"]
    else:
        assert len(spans) == 1
    after = http.post("/v1/completions", json=LONG | {"model": name, "max_tokens": 1, "return_weight_versions": True})
    assert after.json()["choices"][0]["weight_versions"][0]["digest"] == new.digest


def test_a_push_that_activates_nothing_has_no_policy(admin: AdminClient, made: Any) -> None:
    with pytest.raises(APIStatusError, match="in_flight"):
        admin.push_tensors("idle", *weights_of(made.adapters["all"]), activate=False, in_flight="abort")


def test_torch_tensors_are_packed_with_their_checksums() -> None:
    torch = pytest.importorskip("torch")
    head, weights = pack_tensors({"a": torch.arange(4.0)}, {"r": 1, "target_modules": {"q", "a"}})
    fields = json.loads(head[8:])
    assert fields["config"] == {"r": 1, "target_modules": ["a", "q"]}
    assert fields["sha256"] == {"a": hashlib.sha256(weights[-16:]).hexdigest()}


def test_a_wake_up_says_that_the_checkpoint_has_changed_and_answers_as_the_new_weights_do(
    made: Any, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(made.base, base)
    body = {"model": BASE, "prompt": [*range(7, 60)], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with (
        real_server.running(tmp_path, base, {}, {}, max_model_len=512, kv_cache_tokens=4096) as server,
        httpx.Client(base_url=server.url, headers=ADMIN, timeout=120) as http,
    ):
        former = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        assert http.post("/sleep", params={"level": 2}).is_success
        other = make_model(tmp_path / "other", "llama3", seed=5)
        shutil.copy(other / "model.safetensors", base)
        woken = http.post("/wake_up").json()
        assert woken["base_changed"] and len(woken["base_digest"]) == 32
        assert "lorafleet_engine_base_changes_total{" in http.get("/metrics").text
        later = [http.post("/v1/completions", json=body).json()["choices"][0]["text"] for _ in range(2)]
    assert later[0] == later[1] != former
