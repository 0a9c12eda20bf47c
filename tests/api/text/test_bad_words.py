"""bad_words mean what they mean to vLLM, and words that are fewer tokens behind a space are banned there too."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from lorafleet.api.text.bad_words import spellings, token_sequences
from lorafleet.protocol.limits import MAX_BAD_WORDS_TOKENS


def test_each_word_is_spelled_without_and_with_a_space():
    assert spellings(["a b", "  c"]) == ["a b", " a b", "c", " c"]


@pytest.mark.parametrize(
    ("encoded", "sequences"),
    [
        ([[1, 2], [3, 2]], [[1, 2], [3, 2]]),  # The space makes another first token.
        ([[1, 2], [9, 1, 2]], [[1, 2]]),  # The space is a token of its own, which stays allowed.
        ([[1, 2, 4], [3]], [[1, 2, 4], [3]]),  # The space and the word are one token.
        ([[1, 2], [1, 3]], [[1, 2]]),
        ([[], [9]], []),
    ],
)
def test_the_spelling_with_a_space_counts_unless_it_is_the_other_one_behind_a_space(encoded, sequences):
    assert token_sequences(encoded) == sequences


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_the_engine_gets_the_words_in_the_models_tokens(http: httpx.AsyncClient, engine: Any, path: str):
    given = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    given = {"input": "a"} if path == "/v1/responses" else given
    body = {"model": "llama", **given, "bad_words": ["story"], "allowed_token_ids": [7, 8]}
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    [request] = engine.requests
    encoded = [engine.tokenizer.encode(text, add_special_tokens=False) for text in ("story", " story")]
    assert request.params.bad_words_token_ids == token_sequences(encoded)
    assert request.params.allowed_token_ids == [7, 8]


async def test_words_of_too_many_tokens_are_refused(http: httpx.AsyncClient):
    """Each of them takes memory of the GPU for each answer."""
    words = [f"{i:03}" + "🎉" * 60 for i in range(512)]
    response = await http.post("/v1/completions", json={"model": "llama", "prompt": "a", "bad_words": words})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "bad_words")
    assert f"at most {MAX_BAD_WORDS_TOKENS}" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"bad_words": [" "]}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [7], "guided_regex": "a"}, "allowed_token_ids"),
        ({"bad_words": ["a"], "response_format": {"type": "json_object"}}, "bad_words"),
    ],
)
async def test_lists_that_leave_nothing_to_answer_are_refused(http: httpx.AsyncClient, fields: Any, param: str):
    response = await http.post("/v1/completions", json={"model": "llama", "prompt": "a", **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("use_beam_search", True, "`n` and `logprobs`"),
        ("prompt_embeds", "AAAA", "token ids"),
        ("length_penalty", 2, "beam"),
    ],
)
async def test_beam_search_and_embeddings_are_refused_with_the_reason(
    http: httpx.AsyncClient, field: str, value: Any, remedy: str
):
    error = (await http.post("/v1/completions", json={"model": "llama", "prompt": "a", field: value})).json()["error"]
    assert error["param"] == field
    assert remedy in error["message"]
