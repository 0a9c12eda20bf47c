"""Runs a comparison on a server of this API. It needs vLLM's extensions: /tokenize, prompt_logprobs and
return_token_ids."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx

from lorafleet.protocol.errors import InvalidRequest, LorafleetError
from lorafleet.protocol.messages import TokenLogprobs
from lorafleet.tools.examples import Example

AT_A_TIME = 16  # Concurrent requests; the server batches them.
TIMEOUT_S = 600.0  # A first request may wait for its adapter.
ATTEMPTS = 6  # Attempts for a request if the server is too busy.

T = TypeVar("T")
Given = TypeVar("Given")


class ServerRunner:
    """A Runner on a running server.

    Args:
        url: The server's address, with or without /v1.
        models: The server's names for the models, by their names in the comparison.
    """

    def __init__(
        self,
        url: str,
        models: Mapping[str, str],
        api_key: str | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._models = models
        self._client = httpx.Client(
            base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=TIMEOUT_S, trust_env=False
        )
        self._pool = ThreadPoolExecutor(AT_A_TIME)
        self._sleep = sleep

    def encode(self, example: Example) -> list[int]:
        asked: dict[str, Any] = {"messages": [*example.messages]} if example.messages else {"prompt": example.prompt}
        return self._tokenized(asked)

    def encode_answer(self, text: str) -> list[int]:
        return self._tokenized({"prompt": text, "add_special_tokens": False})

    def decode(self, token_ids: Sequence[int]) -> str:
        body = {"model": next(iter(self._models.values())), "tokens": [*token_ids]}
        text: str = self._post("/detokenize", body)["prompt"]
        return text

    def generate(self, name: str, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        def answer(prompt: list[int]) -> list[int]:
            body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True}
            token_ids: list[int] = self._complete(name, body, "token_ids")
            return token_ids

        return self._each(answer, prompts)

    def score(self, name: str, sequences: Sequence[list[int]], top_k: int) -> list[list[TokenLogprobs | None]]:
        def scored(sequence: list[int]) -> list[TokenLogprobs | None]:
            body = {"prompt": sequence, "max_tokens": 1, "temperature": 0, "prompt_logprobs": top_k}
            places = self._complete(name, body, "prompt_logprobs")
            return [_read_place(place, token, top_k) for place, token in zip(places, sequence, strict=True)]

        return self._each(scored, sequences)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._client.close()

    def _each(self, ask: Callable[[Given], T], given: Sequence[Given]) -> list[T]:
        return list(self._pool.map(ask, given))

    def _tokenized(self, asked: dict[str, Any]) -> list[int]:
        token_ids: list[int] = self._post("/tokenize", {"model": next(iter(self._models.values())), **asked})["tokens"]
        return token_ids

    def _complete(self, name: str, body: dict[str, Any], field: str) -> Any:
        reply = self._post("/v1/completions", {"model": self._models[name], **body})
        [choice] = reply["choices"]
        if choice.get(field) is None:
            raise InvalidRequest(f"the server's answers have no {field}, which a comparison requires.")
        return choice[field]

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        for attempts_left in reversed(range(ATTEMPTS)):
            try:
                reply = self._client.post(path, json=body)
            except httpx.HTTPError as error:
                raise LorafleetError(f"{self._client.base_url} does not answer: {error!r}.") from None
            if reply.status_code != httpx.codes.TOO_MANY_REQUESTS or not attempts_left:
                break
            self._sleep(_wait_s(reply.headers.get("retry-after", "1")))
        if reply.status_code != httpx.codes.OK:
            raise InvalidRequest(f"{path}: {reply.status_code}: {_words(reply)}")
        return reply.json()


def _wait_s(retry_after: str) -> float:
    return min(float(retry_after) if retry_after.isdecimal() else 1.0, 30.0)


def _words(reply: httpx.Response) -> str:
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return reply.text[:500]


def _read_place(place: dict[str, Any] | None, token: int, top_k: int) -> TokenLogprobs | None:
    """Reads vLLM's entry for one position: the token's own logprob and the k best, by token id."""
    if place is None:
        return None
    ranked = sorted((entry["rank"], entry["logprob"], int(number)) for number, entry in place.items())[:top_k]
    own = place[str(token)]
    return TokenLogprobs(token, own["logprob"], own["rank"], [i for *_, i in ranked], [lp for _, lp, _ in ranked])
