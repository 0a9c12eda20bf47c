from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from lorafleet.api.answer.error_responses import TABLE, http_error
from lorafleet.api.request.fields import NO_EFFECT, NO_OP_VALUES
from lorafleet.protocol import errors

JSON = {"content-type": "application/json"}
COMPLETION: dict[str, Any] = {"model": "llama", "prompt": "a", "max_tokens": 2}
CHAT: dict[str, Any] = {"model": "llama", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


async def refused(http: httpx.AsyncClient, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    response = await http.post(path, json=body)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_every_error_has_a_status() -> None:
    assert http_error(errors.ConfigError("x")).status == 500
    served = {getattr(errors, n) for n in dir(errors) if isinstance(getattr(errors, n), type)}
    missing = {c for c in served if issubclass(c, errors.LorafleetError)} - set(TABLE)
    assert missing == {errors.ConfigError, errors.UnsupportedModel, errors.NothingToShare}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_unknown_model_is_404_in_vllms_words(http: httpx.AsyncClient, path: str, stream: bool) -> None:
    body = (COMPLETION if path == "/v1/completions" else CHAT) | {"model": "gpt", "stream": stream}
    error = await refused(http, path, body, 404)
    assert (error["message"], error["code"]) == ("The model `gpt` does not exist.", "model_not_found")
    for name in ("llama:gpt", "", "llama:", "sql\x00", "../etc"):
        error = await refused(http, path, body | {"model": name}, 404)
        assert error["message"] == f"The model `{name}` does not exist."


def test_openai_python_knows_the_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="gpt", prompt="a")
    with pytest.raises(openai.BadRequestError, match="suffix"):
        client.completions.create(model="llama", prompt="a", suffix="b")


@pytest.mark.parametrize("stream", [False, True])
async def test_context_overflow_names_both_numbers_and_the_remedy(http: httpx.AsyncClient, stream: bool) -> None:
    body = {"model": "llama", "prompt": [1] * 200, "max_tokens": 100, "stream": stream}
    error = await refused(http, "/v1/completions", body)
    assert error["code"] == "context_length_exceeded"
    for number in ("256", "200", "100", "lower max_tokens to 56"):
        assert number in error["message"]
    error = await refused(http, "/v1/completions", {"model": "llama", "prompt": [1] * 256})
    assert error["code"] == "context_length_exceeded"
    chat = CHAT | {"messages": [{"role": "user", "content": "日" * 400}]}
    error = await refused(http, "/v1/chat/completions", chat)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


async def test_a_small_kv_cache_limits_too(http: httpx.AsyncClient, engine: Any) -> None:
    engine.hello = type(engine.hello)(engine.hello.vocab_size, 256, 64, [0])
    error = await refused(http, "/v1/completions", {"model": "llama", "prompt": [1] * 60, "max_tokens": 10})
    assert "KV cache holds 64 tokens" in error["message"]


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[1]", b'"a"', b"null", b"\xff", b'{"a": NaN}', b'{"prompt": "\\ud800"}', b"[" * 99999]
)
async def test_bodies_that_are_no_json_objects_are_400(http: httpx.AsyncClient, raw: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/v1/load_lora_adapter"):
        response = await http.post(path, content=raw, headers=JSON)
        assert response.status_code == 400, path
        assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a"] * 3000}, "prompt"),
        ({"model": 3}, "model"),
        ({"max_tokens": "3"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"prompt": ["a"] * 100, "n": 100}, "n"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"7": 101}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"stop": ""}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": 3}, "stop"),
        ({"stop": ["a", 3]}, "stop.1"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids.0"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usages": True}}, "stream_options.include_usages"),
        ({"seed": 2**63}, "seed"),
        ({"echo": "yes"}, "echo"),
        ({"messages": []}, "messages"),
        ({"temprature": 1}, "temprature"),
        ({"request_id": 3}, "request_id"),
    ],
)
async def test_a_wrong_field_of_a_completion_is_named(
    http: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    error = await refused(http, "/v1/completions", COMPLETION | fields)
    assert error["param"] == param, error
    assert param.split(".")[0] in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"prompt": "a"}, "prompt"),
    ],
)
async def test_a_wrong_field_of_a_chat_is_named(http: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    error = await refused(http, "/v1/chat/completions", CHAT | fields)
    assert error["param"] == param, error
    assert param in error["message"]


async def test_missing_fields_are_named(http: httpx.AsyncClient) -> None:
    assert (await refused(http, "/v1/completions", {"model": "llama"}))["param"] == "prompt"
    assert (await refused(http, "/v1/chat/completions", {"model": "llama"}))["param"] == "messages"


@pytest.mark.parametrize("field", sorted(NO_OP_VALUES))
async def test_a_field_with_an_effect_is_refused_by_name_and_its_no_op_is_taken(
    http: httpx.AsyncClient, field: str
) -> None:
    path, body = ("/v1/completions", COMPLETION) if field != "echo" else ("/v1/chat/completions", CHAT)
    error = await refused(http, path, body | {field: "something else"})
    assert error["param"] == field
    for harmless in (None, *NO_OP_VALUES[field]):
        assert (await http.post(path, json=body | {field: harmless})).status_code == 200


async def test_fields_without_effect_are_taken(http: httpx.AsyncClient) -> None:
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        assert (await http.post(path, json=body | dict.fromkeys(NO_EFFECT, "x"))).status_code == 200


async def test_null_means_the_default(http: httpx.AsyncClient) -> None:
    nothing = dict.fromkeys(("n", "temperature", "stop", "stream", "stream_options", "logprobs", "seed", "model"))
    assert (await http.post("/v1/completions", json=COMPLETION | nothing)).status_code == 200


async def test_unknown_paths_and_methods_have_error_bodies(http: httpx.AsyncClient) -> None:
    error = await refused(http, "/v1/audio/speech", {}, 404)
    assert "/v1/audio/speech" in error["message"]
    response = await http.get("/v1/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert response.json()["error"]["code"] == "method_not_supported"
    assert (await http.put("/ping")).headers["allow"] == "GET, HEAD, POST"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (errors.AdapterMalformed("bad"), 400, "adapter_malformed"),
        (errors.RankTooLarge("big"), 400, "rank_too_large"),
        (errors.AdapterChanged("new"), 409, "adapter_changed"),
        (errors.Overloaded("full"), 503, "overloaded"),
        (errors.EngineDead("gone"), 503, "engine_dead"),
        (errors.LorafleetError("odd"), 500, "internal_error"),
        (ValueError("a bug"), 500, "internal_error"),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
async def test_errors_before_the_first_token_are_statuses(
    http: httpx.AsyncClient, engine: Any, failure: Exception, status: int, code: str, stream: bool, n: int
) -> None:
    engine.fail_after, engine.failure = 0, failure
    error = await refused(http, "/v1/completions", COMPLETION | {"stream": stream, "n": n}, status)
    assert error["code"] == code
    assert "a bug" not in error["message"]


@pytest.mark.parametrize("failure", [errors.EngineDead("the loop stopped"), ValueError("a bug")])
async def test_errors_within_a_stream_are_its_last_event(
    http: httpx.AsyncClient, engine: Any, failure: Exception
) -> None:
    engine.fail_after, engine.failure = 2, failure
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        response = await http.post(path, json=body | {"stream": True, "max_tokens": 9})
        assert response.status_code == 200
        events = response.text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        assert events[-3].startswith('data: {"error":{"message":"')
        assert "a bug" not in events[-3]


def test_openai_python_raises_on_an_error_within_a_stream(client: openai.OpenAI, engine: Any) -> None:
    engine.fail_after = 2
    with pytest.raises(openai.APIError, match="tripped"):
        list(client.completions.create(model="llama", prompt="a", stream=True))


async def test_a_starting_replica_says_so(http: httpx.AsyncClient, holder: Any) -> None:
    holder.front = None
    for path in ("/health", "/v1/models"):
        response = await http.get(path)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert "starting" in response.json()["error"]["message"]


async def test_a_message_with_half_a_character_is_answered_with_its_status(
    http: httpx.AsyncClient, catalog: Any
) -> None:
    catalog.failure = errors.AdapterMalformed("the file holds \udcff")
    response = await http.post("/v1/completions", json={"model": "sql", "prompt": "a"})
    assert (response.status_code, response.json()["error"]["message"]) == (400, "the file holds \\udcff")


async def test_an_adapter_that_cannot_be_served_is_its_own_error(http: httpx.AsyncClient, catalog: Any) -> None:
    catalog.failure = errors.AdapterUnsupported("DoRA is not served")
    error = await refused(http, "/v1/completions", COMPLETION | {"model": "sql"})
    assert (error["message"], error["code"]) == ("DoRA is not served", "adapter_unsupported")


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate", "/tokenize"])
async def test_a_body_over_the_limit_is_413_naming_value_bound_and_remedy(
    http: httpx.AsyncClient, front: Any, path: str, declared: bool
) -> None:
    front.config = dataclasses.replace(front.config, max_body_bytes=1000)

    async def in_pieces(body: bytes) -> AsyncIterator[bytes]:
        for start in range(0, len(body), 300):
            yield body[start : start + 300]

    def sent(size: int) -> Any:
        body = json.dumps(COMPLETION).encode().ljust(size)
        return http.post(path, content=body if declared else in_pieces(body), headers=JSON)

    assert (await sent(1000)).status_code != 413
    response = await sent(1001)
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (413, "invalid_request_error", "body_too_large")
    for part in ("1001 bytes" if declared else "more than 1000 bytes", "at most 1000", "--max-body-bytes"):
        assert part in error["message"]
    assert (await http.post("/v1/completions", json=COMPLETION)).status_code == 200  # on the same connection
