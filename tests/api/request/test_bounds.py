"""Every field of a request has a bound: what is over it is a 400 that names the field, its size and the bound."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx
import pytest

from lorafleet.protocol import limits
from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.sampling_params import SamplingParams

COMPLETION: dict[str, Any] = {"model": "llama", "prompt": "a", "max_tokens": 2}
CHAT: dict[str, Any] = {"model": "llama", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
RESPONSES: dict[str, Any] = {"model": "llama", "input": "hi"}
GENERATE: dict[str, Any] = {"text": "a"}
EMBEDDING: dict[str, Any] = {"model": "llama", "input": "a"}
LEAST = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/generate": GENERATE,
    "/v1/embeddings": EMBEDDING,
}
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
FUNCTION = {"type": "function", "function": {"name": "f"}}
HUGE = 10**400


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def nested(depth: int) -> Any:
    return json.loads("[" * depth + "]" * depth)


# Each with the numbers that the answer must say: the size or value, and the bound.
OVER: list[tuple[str, dict[str, Any], str, list[str]]] = [
    ("/v1/completions", {"model": "m" * 4097}, "model", ["4097", "4096"]),
    ("/v1/completions", {"prompt": "a" * 8_388_609}, "prompt", ["8388609", "8388608"]),
    ("/v1/completions", {"prompt": ["a"] * 2049}, "prompt", ["2049", "2048"]),
    ("/v1/completions", {"prompt": [1] * 300}, "prompt", ["300", "256"]),
    ("/v1/completions", {"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", ["1025", "1024"]),
    ("/v1/completions", {"logit_bias": {"7": 101}}, "logit_bias", ["101", "100"]),
    ("/v1/completions", {"stop": ["a"] * 17}, "stop", ["17", "16"]),
    ("/v1/completions", {"stop": "a" * 1025}, "stop", ["1025", "1024"]),
    ("/v1/completions", {"stop": ["b", "a" * 1025]}, "stop.1", ["1025", "1024"]),
    ("/v1/completions", {"stop_token_ids": [1] * 1025}, "stop_token_ids", ["1025", "1024"]),
    ("/v1/completions", {"stop_token_ids": [2**31]}, "stop_token_ids.0", ["2147483648", "2147483647"]),
    ("/v1/completions", {"allowed_token_ids": [1] * 16_385}, "allowed_token_ids", ["16385", "16384"]),
    ("/v1/completions", {"allowed_token_ids": [9999]}, "allowed_token_ids", ["9999"]),
    ("/v1/completions", {"prompt": ["a"] * 129, "allowed_token_ids": [1] * 16_384}, "n", ["2113536", "2097152"]),
    (
        "/v1/completions",
        {"prompt": ["a"] * 2048, "stop_token_ids": [1] * 1024, "logit_bias": {"7": 1}},
        "n",
        ["2099200", "2097152"],
    ),
    ("/v1/completions", {"prompt": ["a"] * 2048, "guided_regex": "a" * 16_385}, "n", ["33556480", "33554432"]),
    (
        "/generate",
        {"text": ["a"] * 65, "lora_path": [f"a{i}" for i in range(65)]},
        "lora_path",
        ["65 models", "64"],
    ),
    ("/v1/completions", {"bad_words": ["a"] * 513}, "bad_words", ["513", "512"]),
    ("/v1/completions", {"bad_words": ["b", "a" * 129]}, "bad_words.1", ["129", "128"]),
    ("/v1/completions", {"request_id": "r" * 257}, "request_id", ["257", "256"]),
    ("/v1/completions", {"cache_salt": "s" * 1025}, "cache_salt", ["1025", "1024"]),
    ("/v1/completions", {"user": "u" * 1025}, "user", ["1025", "1024"]),
    ("/v1/completions", {"metadata": {"a": "x" * 1_048_577}}, "metadata", ["1048577", "1048576"]),
    ("/v1/completions", {"metadata": {"k" * 1025: "x"}}, "metadata", ["1024"]),
    ("/v1/completions", {"metadata": nested(70)}, "metadata", ["64"]),
    ("/v1/completions", {"prediction": [0] * 65_537}, "prediction", ["65536"]),
    ("/v1/completions", {"lora_weights": [1.0] * 9}, "lora_weights", ["9", "8"]),
    ("/v1/completions", {"n": 129}, "n", ["129", "128"]),
    ("/v1/completions", {"n": HUGE}, "n", ["1e400", "128"]),
    ("/v1/completions", {"best_of": 129}, "best_of", ["129", "128"]),
    ("/v1/completions", {"logprobs": 21}, "logprobs", ["21", "20"]),
    ("/v1/completions", {"prompt_logprobs": 21}, "prompt_logprobs", ["21", "20"]),
    ("/v1/completions", {"temperature": HUGE}, "temperature", ["1e400", "100"]),
    ("/v1/completions", {"temperature": -HUGE}, "temperature", ["-1e400", "100"]),
    ("/v1/completions", {"seed": 2**63}, "seed", [str(2**63), str(2**63 - 1)]),
    ("/v1/completions", {"max_tokens": 2**31}, "max_tokens", ["2147483648", "2147483647"]),
    ("/v1/completions", {"priority": -(2**31)}, "priority", ["-2147483648", "-2147483647"]),
    ("/v1/completions", {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", ["-2", "-1"]),
    ("/v1/completions", {"guided_regex": "a" * 1_048_577}, "guided_regex", ["1048577", "1048576"]),
    ("/v1/completions", {"guided_grammar": "a" * 1_048_577}, "guided_grammar", ["1048577", "1048576"]),
    ("/v1/completions", {"guided_choice": ["a"] * 10_001}, "guided_choice", ["10001", "10000"]),
    ("/v1/completions", {"guided_json": {"enum": [0] * 65_536}}, "guided_json", ["65536"]),
    ("/v1/completions", {"guided_json": {"maximum": HUGE}}, "guided_json", ["1e400", "1e+308"]),
    ("/v1/completions", {"stream_options": {str(i): 1 for i in range(257)}}, "stream_options", ["257", "256"]),
    ("/v1/completions", {str(i): 1 for i in range(257)}, "", ["260", "256"]),
    ("/v1/chat/completions", {"messages": CHAT["messages"] * 4097}, "messages", ["4097", "4096"]),
    ("/v1/chat/completions", user("a" * 8_388_609), "messages.0.content", ["8388609", "8388608"]),
    ("/v1/chat/completions", user(["a"] * 4097), "messages.0.content", ["4097", "4096"]),
    ("/v1/chat/completions", {"messages": user(["a"] * 4096)["messages"] * 5}, "messages", ["20480", "16384"]),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "assistant", "tool_calls": [CALL] * 4097}]},
        "messages.0.tool_calls",
        ["4097", "4096"],
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a", "name": "n" * 1025}]},
        "messages.0.name",
        ["1025", "1024"],
    ),
    ("/v1/chat/completions", {"tools": [FUNCTION] * 513}, "tools", ["513", "512"]),
    (
        "/v1/chat/completions",
        {"tools": [{"type": "function", "function": {"name": "f" * 257}}]},
        "tools.0.function.name",
        ["257", "256"],
    ),
    (
        "/v1/chat/completions",
        {"tools": [{"type": "function", "function": {"name": "f", "description": "d" * 65_537}}]},
        "tools.0.function.description",
        ["65537", "65536"],
    ),
    (
        "/v1/chat/completions",
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": [0] * 65_536}}}]},
        "tools.0.function.parameters",
        ["65536"],
    ),
    (
        "/v1/chat/completions",
        {"chat_template_kwargs": {str(i): 0 for i in range(257)}},
        "chat_template_kwargs",
        ["257", "256"],
    ),
    ("/v1/chat/completions", {"chat_template_kwargs": {"a": nested(70)}}, "chat_template_kwargs", ["64"]),
    ("/v1/chat/completions", {"chat_template_kwargs": {"a": HUGE}}, "chat_template_kwargs", ["1e400"]),
    ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs", ["21", "20"]),
    ("/v1/responses", {"input": [{"role": "user", "content": "a"}] * 4097}, "input", ["4097", "4096"]),
    ("/v1/responses", {"input": [{"role": "user", "content": "a", "id": "i" * 1025}]}, "input.0.id", ["1025", "1024"]),
    ("/v1/responses", {"metadata": {str(i): "" for i in range(65)}}, "metadata", ["65", "64"]),
    ("/v1/responses", {"metadata": {"a": "x" * 4097}}, "metadata.a", ["4097", "4096"]),
    ("/v1/responses", {"include": ["reasoning.encrypted_content"] * 65}, "include", ["65", "64"]),
    ("/generate", {"rid": "r" * 257}, "rid", ["257", "256"]),
    ("/generate", {"rid": ["r" * 257]}, "rid", ["257", "256"]),
    ("/generate", {"lora_path": "m" * 4097}, "lora_path", ["4097", "4096"]),
    ("/generate", {"top_logprobs_num": 21}, "top_logprobs_num", ["21", "20"]),
    ("/generate", {"sampling_params": {"stop": ["a"] * 17}}, "sampling_params.stop", ["17", "16"]),
    ("/generate", {"sampling_params": {"top_k": 2**31}}, "sampling_params.top_k", ["2147483648", "2147483647"]),
    ("/v1/embeddings", {"dimensions": 2**21}, "dimensions", ["2097152", "1048576"]),
    ("/v1/embeddings", {"input": ["a"] * 2049}, "input", ["2049", "2048"]),
    ("/tokenize", {"prompt": "a" * 1_048_577}, "prompt", ["1048577", "1048576"]),
    ("/tokenize", {"messages": CHAT["messages"] * 4097}, "messages", ["4097", "4096"]),
    ("/detokenize", {"tokens": [0] * 131_073}, "tokens", ["131073", "131072"]),
    ("/detokenize", {"tokens": [HUGE]}, "tokens", ["1e400"]),
    ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "p" * 4097}, "lora_path", ["4097", "4096"]),
    ("/v1/unload_lora_adapter", {"lora_name": "a", "lora_int_id": HUGE}, "lora_int_id", ["1e400"]),
]


def named(value: Any) -> str | None:
    return f"{value[0]} {value[2]}" if isinstance(value, tuple) else None


@pytest.mark.parametrize("over", OVER, ids=[f"{path} {param}" for path, _, param, _ in OVER])
async def test_what_is_over_a_bound_is_refused_by_field_value_and_bound(
    http: httpx.AsyncClient, over: tuple[str, dict[str, Any], str, list[str]]
) -> None:
    path, fields, param, numbers = over
    body = LEAST.get(path, {}) | fields
    response = await http.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert (response.status_code, error["param"] or "") == (400, param), response.text[:500]
    assert len(error["message"]) < 600
    for part in (param.split(".")[0], *numbers):
        assert part in error["message"], error["message"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "a", "stop": ["a"] * 2000}, "`stop` has 2000 entries; at most 16 are allowed."),
        ({"prompt": "a", "cache_salt": ""}, "`cache_salt` has 0 characters; it must have at least 1."),
        ({"messages": []}, "`messages` has 0 entries; it must have at least 1."),
    ],
)
async def test_a_size_out_of_bounds_is_told_in_words_of_the_fields_type(
    http: httpx.AsyncClient, fields: dict[str, Any], message: str
) -> None:
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    response = await http.post(path, json={"model": "llama", **fields})
    assert (response.status_code, response.json()["error"]["message"]) == (400, message)


@pytest.mark.parametrize("key", ["007", "+7", " 7", "7 ", "-1", "1_0", "٧", "", "7.0", "1" * 11])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
async def test_an_id_of_logit_bias_has_one_spelling(http: httpx.AsyncClient, path: str, key: str) -> None:
    fields = {"logit_bias": {key: 1}}
    response = await http.post(
        path, json=LEAST[path] | (fields if path != "/generate" else {"sampling_params": fields})
    )
    assert (response.status_code, response.json()["error"]["param"]) == (400, "logit_bias"), response.text
    assert "leading zeros" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate", "/v1/embeddings"])
@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("X-Request-Id", "r" * 257),
        ("X-Request-Id", "r\tr"),
        *(
            ("X-Queue-Timeout-Seconds", value)
            for value in ("1e999", "nan", "-1", "inf", "9" * 5000, "1e5", "0x10", "soon", "1_0e")
        ),
    ],
)
async def test_a_header_over_its_bound_is_refused_by_name(
    http: httpx.AsyncClient, path: str, header: str, value: str
) -> None:
    response = await http.post(path, json=LEAST[path], headers={header: value})
    assert (response.status_code, response.json()["error"]["param"]) == (400, header), response.text
    assert len(response.json()["error"]["message"]) < 400


async def test_values_at_their_bounds_are_taken(http: httpx.AsyncClient) -> None:
    at_most = {
        "logit_bias": {str(i): 100 for i in range(300)},
        "stop": ["x" * limits.MAX_STOP_CHARS] * limits.MAX_STOP_STRINGS,
        "stop_token_ids": [1] * limits.MAX_STOP_TOKEN_IDS,
        "request_id": "r" * limits.MAX_REQUEST_ID_CHARS,
        "user": "u" * limits.MAX_LABEL_CHARS,
        "seed": 2**63 - 1,
    }
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert (await http.post(path, json=LEAST[path] | at_most)).status_code == 200


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": dict.fromkeys(range(1025), 0.0)}, "logit_bias has 1025 entries; at most 1024"),
        ({"stop_token_ids": [0] * 1025}, "stop_token_ids has 1025 entries; at most 1024"),
        ({"stop": ["a"] * 17}, "stop has 17 entries; at most 16"),
        ({"stop": "a" * 1025}, "stop has a string of 1025 characters; at most 1024"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": HUGE}, r"temperature=about 1e400 is out of range; it must be in \[0.0, 100.0\]"),
        ({"top_p": 0}, r"\(0.0, 1.0\]"),
    ],
)
def test_llm_has_the_same_bounds(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize"]
)
async def test_a_compressed_body_is_415_and_the_answer_names_the_header(http: httpx.AsyncClient, path: str) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    response = await http.post(path, content=gzip.compress(b"{}"), headers=headers)
    error = response.json()["error"]
    assert response.status_code == 415 and "The header Content-Encoding is 'gzip'" in error["message"]
    response = await http.post(path, content=b"{}", headers=headers | {"content-encoding": "identity"})
    assert response.status_code == 400


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "x" * 5000])
async def test_a_body_that_is_not_said_to_be_json_is_415_and_the_answer_says_which_header_to_send(
    http: httpx.AsyncClient, content_type: str | None
) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    for path in (*LEAST, "/tokenize", "/detokenize", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        response = await http.post(path, content=json.dumps(LEAST.get(path, {})), headers=headers)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (415, "unsupported_media_type"), path
        assert "-H 'content-type: application/json'" in error["message"] and len(error["message"]) < 400


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON"])
async def test_parameters_and_case_of_the_content_type_do_not_matter(
    http: httpx.AsyncClient, content_type: str
) -> None:
    headers = {"content-type": content_type}
    assert (await http.post("/v1/completions", content=json.dumps(COMPLETION), headers=headers)).status_code == 200


@pytest.mark.parametrize("value", [b"0,", b"[],", b'{"a":0},', b'"a",'])
async def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(http: httpx.AsyncClient, value: bytes) -> None:
    body = b'{"prompt": [' + value * 1_100_000 + b"0]}"
    response = await http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large"), response.text[:300]
    assert "1048576 commas" in response.json()["error"]["message"]


async def test_an_object_of_too_many_keys_is_refused_before_it_is_parsed(http: httpx.AsyncClient) -> None:
    body = json.dumps({"metadata": dict.fromkeys(map(str, range(140_000)), 0)})
    response = await http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large"), response.text[:300]
    assert "131072 colons" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "number", ["1" * 5000, "-" + "1" * 5000, "1e400", "NaN", "Infinity", "-Infinity", "1e99999999"]
)
@pytest.mark.parametrize("path", [*LEAST, "/tokenize", "/detokenize", "/v1/load_lora_adapter"])
async def test_numbers_that_json_or_python_cannot_hold_are_400(http: httpx.AsyncClient, path: str, number: str) -> None:
    for field in ("temperature", "priority", "metadata", "tokens", "chat_template_kwargs", "x"):
        body = json.dumps(LEAST.get(path, {}) | {field: "@"}).replace('"@"', number)
        response = await http.post(path, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400, response.text


async def test_minus_zero_is_zero(http: httpx.AsyncClient) -> None:
    body = json.dumps(COMPLETION | {"temperature": "@", "min_tokens": "@"}).replace('"@"', "-0")
    response = await http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 200


async def test_a_name_in_the_path_is_bounded(http: httpx.AsyncClient) -> None:
    response = await http.get(f"/v1/models/{'m' * 4097}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "model")
    response = await http.get(f"/v1/models/{'m' * 4096}")
    assert response.status_code == 404 and len(response.json()["error"]["message"]) < 300
