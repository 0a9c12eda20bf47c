"""The fields by which trainers read what was sampled: token ids, experts, and of which probabilities logprobs are."""

from __future__ import annotations

import base64
import io
import json
import threading
from typing import Any

import httpx
import numpy as np
import pytest

from lorafleet.api.answer.routed_answer import RoutedAnswer
from lorafleet.protocol.limits import MAX_ROUTED_BYTES
from lorafleet.protocol.messages import RoutedShape

COMPLETION = {"model": "llama", "prompt": [7, 8, 9], "max_tokens": 4}
CHAT = {"model": "llama", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
RESPONSE = {"model": "llama", "input": "a", "max_output_tokens": 4}
TOKENS = {"token_ids": [7, 8, 9], "sampling_params": {"max_tokens": 4}}
SGLANG = {"input_ids": [7, 8, 9], "sampling_params": {"max_new_tokens": 4}}
ROUTES = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": CHAT,
    "/inference/v1/generate": TOKENS,
    "/generate": SGLANG,
}
SHAPE = (2, 3)  # Layers, and experts of a token.


@pytest.fixture
def experts(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the scripted engine return experts: token i has 10 * i, 10 * i + 1, ...

    Returns the expected numbers for so many tokens.
    """
    monkeypatch.setattr(
        engine, "hello", type(engine.hello)(**_fields(engine.hello) | {"routed": RoutedShape(*SHAPE, 1)})
    )
    plain = engine._outputs

    def rows(first: int, count: int) -> np.ndarray:
        tokens = np.arange(first, first + count, dtype=np.uint8)[:, None] * 10 + np.arange(6, dtype=np.uint8)
        return tokens.reshape(count, *SHAPE)

    def outputs(request: Any) -> Any:
        computed = 0
        for output in plain(request):
            count = 1 if computed else len(request.prompt_token_ids)
            if request.returns_experts:
                output.routed_experts = rows(computed, count).tobytes()
            computed += count
            yield output

    monkeypatch.setattr(engine, "_outputs", outputs)
    return lambda count: rows(0, count)


def _fields(hello: Any) -> dict[str, Any]:
    return {name: getattr(hello, name) for name in hello.__struct_fields__}


def last_chunk(answer: httpx.Response) -> Any:
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return json.loads(events[-1])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
async def test_experts_come_with_the_end_of_each_answer(
    http: httpx.AsyncClient, engine: Any, experts: Any, route: str, stream: bool
) -> None:
    body = ROUTES[route] | {"stream": stream, "return_routed_experts": True}
    answer = await http.post(route, json=body)
    assert answer.status_code == 200, answer.text
    content = last_chunk(answer) if stream else answer.json()
    num_tokens = len(engine.requests[0].prompt_token_ids) + 3
    if route == "/generate":
        found = np.frombuffer(base64.b64decode(content["meta_info"]["routed_experts"]), np.int32)
        np.testing.assert_array_equal(found.reshape(-1, *SHAPE), experts(num_tokens))
    else:
        file = io.BytesIO(base64.b64decode(content["choices"][0]["routed_experts"]))
        found = np.load(file, allow_pickle=False)
        assert found.dtype == np.uint8
        np.testing.assert_array_equal(found, experts(num_tokens))
    plain = await http.post(route, json=ROUTES[route])
    assert "routed_experts" not in plain.text and not engine.requests[-1].returns_experts


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.usefixtures("experts")
async def test_many_experts_are_written_beside_the_event_loop(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, route: str, stream: bool
) -> None:
    writers: list[threading.Thread] = []

    def write(self: RoutedAnswer, num_tokens: int) -> str:  # noqa: ARG001  # as the methods
        writers.append(threading.current_thread())
        return ""

    monkeypatch.setattr(RoutedAnswer, "as_vllm", write)
    monkeypatch.setattr(RoutedAnswer, "as_sglang", write)
    monkeypatch.setattr("lorafleet.api.access.long_work.MAX_INLINE_VALUES", 2)
    monkeypatch.setattr("lorafleet.api.answer.generation.BYTES_PER_VALUE", 1)
    assert (await http.post(route, json=ROUTES[route] | {"stream": stream, "return_routed_experts": True})).is_success
    assert writers and threading.current_thread() not in writers


async def test_experts_end_with_a_stop_string(http: httpx.AsyncClient, engine: Any, experts: Any) -> None:
    engine.answer = lambda _: "hello wide world"
    body = COMPLETION | {"stop": "wide", "max_tokens": 50, "return_routed_experts": True, "return_token_ids": True}
    [choice] = (await http.post("/v1/completions", json=body)).json()["choices"]
    found = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
    np.testing.assert_array_equal(found, experts(3 + len(choice["token_ids"]) - 1))


@pytest.mark.parametrize("route", ROUTES)
async def test_experts_that_are_not_recorded_are_refused(http: httpx.AsyncClient, route: str) -> None:
    refused = await http.post(route, json=ROUTES[route] | {"return_routed_experts": True})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "return_routed_experts"
    assert "--enable-return-routed-experts" in refused.json()["error"]["message"]


async def test_the_bytes_of_experts_are_bounded(
    http: httpx.AsyncClient, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = RoutedShape(MAX_ROUTED_BYTES // 14 + 1, 1, 1)
    monkeypatch.setattr(engine, "hello", type(engine.hello)(**_fields(engine.hello) | {"routed": wide}))
    for n, status in ((1, 200), (2, 400)):  # Each answer has at most 7 tokens with its prompt.
        answer = await http.post("/v1/completions", json=COMPLETION | {"n": n, "return_routed_experts": True})
        assert answer.status_code == status
    assert f"at most {MAX_ROUTED_BYTES}" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_returns_the_tokens_of_prompt_and_answer(
    http: httpx.AsyncClient, engine: Any, stream: bool
) -> None:
    answer = await http.post("/v1/responses", json=RESPONSE | {"stream": stream, "return_token_ids": True})
    response = last_chunk(answer)["response"] if stream else answer.json()
    assert response["prompt_token_ids"] == engine.requests[0].prompt_token_ids
    assert response["token_ids"] == engine.tokenizer.encode(engine.answer(engine.requests[0]))[:4]


@pytest.mark.parametrize(
    "route", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/inference/v1/generate"]
)
async def test_a_request_chooses_the_mode_of_its_logprobs(http: httpx.AsyncClient, engine: Any, route: str) -> None:
    body = {**ROUTES, "/v1/responses": RESPONSE}[route]

    def with_mode(mode: str) -> dict[str, Any]:
        if "sampling_params" in body:
            return body | {"sampling_params": {"max_tokens": 4, "logprobs_mode": mode}}
        return body | {"logprobs_mode": mode}

    assert (await http.post(route, json=with_mode("processed_logprobs"))).status_code == 200
    assert engine.requests[0].params.logprobs_mode == "processed_logprobs"
    refused = await http.post(route, json=with_mode("raw_logits"))
    assert refused.status_code == 400
    assert refused.json()["error"]["param"].endswith("logprobs_mode")
