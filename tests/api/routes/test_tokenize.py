from __future__ import annotations

from typing import Any

import httpx
import pytest

from lorafleet.api.text.tokenizer import Tokenizer


async def test_a_prompt_is_tokenized_and_comes_back(http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    body = {"model": "sql", "prompt": "héllo 🎉", "return_token_strs": True}
    answer = (await http.post("/tokenize", json=body)).json()
    ids = tokenizer.encode("héllo 🎉")
    assert answer == {
        "count": len(ids),
        "max_model_len": 256,
        "tokens": ids,
        "token_strs": [tokenizer.token_name(i) for i in ids],
    }
    back = await http.post("/detokenize", json={"model": "sql", "tokens": ids})
    assert back.json() == {"prompt": "héllo 🎉"}


async def test_messages_are_tokenized_as_chat_would(http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer = (await http.post("/tokenize", json={"messages": messages})).json()
    assert answer["tokens"] == tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False)
    assert answer["token_strs"] is None


async def test_long_prompts_are_tokenized_too(http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    text = "hello world " * 2000
    answer = (await http.post("/tokenize", json={"prompt": text})).json()
    assert answer["tokens"] == tokenizer.encode(text)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "a", "messages": []}, 400),
        ("/tokenize", {"prompt": ["a"]}, 400),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, 400),
        ("/tokenize", {"prompt": "a", "model": "gpt"}, 404),
        ("/detokenize", {"tokens": [99999]}, 400),
        ("/detokenize", {"tokens": "a"}, 400),
        ("/detokenize", {}, 400),
        ("/detokenize", {"tokens": [], "model": "gpt"}, 404),
    ],
)
async def test_wrong_requests_are_refused(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], status: int
) -> None:
    assert (await http.post(path, json=body)).status_code == status
