"""docs/api-compatibility.md says what the server does."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

import compatibility

REQUIRED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
}
# A value that asks for something.
ASKING: dict[str, Any] = {"modalities": ["audio"], "service_tier": "priority", "include": ["x"], "suffix": "x"}


def test_the_page_is_the_one_that_is_written_from_the_server() -> None:
    assert compatibility.DOCUMENT.read_text() == compatibility.write(), "run python tests/support/compatibility.py"


@pytest.mark.parametrize("path", REQUIRED)
async def test_openais_fields_that_the_page_calls_refused_are(http: httpx.AsyncClient, path: str) -> None:
    _, model, openais, _ = next(section for section in compatibility.sections() if section[0] == path)
    refused = [name for name in sorted(openais) if compatibility.state_of(model, name).startswith("refused")]
    assert refused
    for name in refused:
        body = {"model": "llama", **REQUIRED[path], name: ASKING.get(name, {"some": "thing"})}
        response = await http.post(path, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("path", REQUIRED)
async def test_openais_fields_that_have_no_effect_are_taken(http: httpx.AsyncClient, path: str) -> None:
    _, model, openais, _ = next(section for section in compatibility.sections() if section[0] == path)
    for name in sorted(openais):
        if compatibility.state_of(model, name) == "no effect":
            response = await http.post(path, json={"model": "llama", **REQUIRED[path], name: "x"})
            assert response.status_code == 200, name


async def test_a_suffix_is_refused_with_what_to_do(http: httpx.AsyncClient) -> None:
    body = {"model": "llama", "prompt": "def f(", "suffix": "return x"}
    error = (await http.post("/v1/completions", json=body)).json()["error"]
    assert error["param"] == "suffix"
    assert "in the middle" in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"use_beam_search": 0}, "use_beam_search"),
        ({"messages": [{"role": "user", "content": "hi", "reasoning_content": 0}]}, "messages.0.reasoning_content"),
    ],
)
async def test_zero_is_not_false(http: httpx.AsyncClient, body: dict[str, Any], param: str) -> None:
    chat = {"model": "llama", **REQUIRED["/v1/chat/completions"], **body}
    response = await http.post("/v1/chat/completions", json=chat)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert (await http.post("/v1/completions", json={"prompt": "hi", "length_penalty": 1})).status_code == 200


# What the clients of `vllm bench serve` and of aiperf send, to the letter.
BENCH: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/completions",
        {"prompt": "hi", "repetition_penalty": 1.0, "max_tokens": 4, "logprobs": None, "stream": True}
        | {"stream_options": {"include_usage": True}, "ignore_eos": True},
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_completion_tokens": 4}
        | {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True},
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "name": "text", "content": "hi"}], "max_completion_tokens": 4, "min_tokens": 4}
        | {"stream": True, "stream_options": {"include_usage": True}},
    ),
    ("/v1/completions", {"prompt": ["hi"], "max_tokens": 4, "stream": True}),
]


@pytest.mark.parametrize(("path", "body"), BENCH)
async def test_benchmark_clients_bodies_are_streamed(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    response = await http.post(path, json={"model": "sql"} | body)
    assert response.status_code == 200, response.text
    assert response.text.endswith("data: [DONE]\n\n")
    assert response.text.count("data: {") >= 4
