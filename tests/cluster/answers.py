"""What a running server answers, for tests that compare it."""

from __future__ import annotations

import httpx

from lorafleet.protocol.limits import MAX_BODY_BYTES


def answer(client: httpx.Client, model: str) -> httpx.Response:
    body = {"model": model, "prompt": "hello", "max_tokens": 6, "temperature": 0, "logprobs": 1}
    return client.post("/v1/completions", json=body)


def seen_logprobs(response: httpx.Response) -> list[float]:
    """Rounded, since float32 sums differ in the last digit with what else is in the batch."""
    return [round(one, 3) for one in response.json()["choices"][0]["logprobs"]["token_logprobs"]]


def logprobs(client: httpx.Client, model: str) -> list[float]:
    response = answer(client, model)
    assert response.status_code == 200, response.text
    return seen_logprobs(response)


def check_body_limit(client: httpx.Client, declared: bool) -> None:
    body = b'{"model": "base", "prompt": "%s"}' % (b"x" * MAX_BODY_BYTES)
    pieces = (body[start : start + (1 << 20)] for start in range(0, len(body), 1 << 20))
    response = client.post(
        "/v1/completions", content=body if declared else pieces, headers={"content-type": "application/json"}
    )
    assert response.status_code == 413, response.text[:300]
    assert response.json()["error"]["code"] == "body_too_large"
    assert str(MAX_BODY_BYTES) in response.json()["error"]["message"]
    assert answer(client, "base").status_code == 200
