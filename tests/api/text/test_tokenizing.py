"""Long texts take turns between tenants, in threads of their own; short ones are not kept waiting by them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.api.text.tokenizing import MAX_INLINE_CHARS, MAX_TEXTS_WAITING, Tokenizing
from lorafleet.protocol.errors import QueueFull

LONG = "x" * (MAX_INLINE_CHARS + 1)


class Held:
    """In a tokenizer's place: long texts wait until the test lets them go."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:  # noqa: ARG002  as a tokenizer's
        assert len(text) < MAX_INLINE_CHARS or self.go.wait(120)
        return [len(text)]


@pytest.fixture
def tokenizing() -> Iterator[Tokenizing]:
    made = Tokenizing()
    yield made
    made.close()


async def test_one_tenant_s_long_texts_keep_nobody_else_waiting_and_are_bounded(tokenizing: Tokenizing) -> None:
    held: Any = Held()
    quick: Any = Held()
    quick.go.set()

    def encode(tokenizer: Any, text: str, group: str) -> asyncio.Task[list[int]]:
        return asyncio.create_task(tokenizing.encode(tokenizer, text, add_special_tokens=True, group=group))

    loud = [encode(held, LONG, "loud") for _ in range(MAX_TEXTS_WAITING + 2)]
    assert await encode(held, "short", "loud") == [5], "it takes no turn"
    assert await encode(quick, LONG, "quiet") == [len(LONG)]
    assert await asyncio.to_thread(lambda: "free") == "free", "the loop's own threads are not taken"
    with pytest.raises(QueueFull, match="128 jobs of the same tenant or model are waiting"):
        await loud[-1]
    assert sum(task.done() for task in loud) == 1
    held.go.set()
    assert all(await asyncio.gather(*loud[:-1]))


async def test_long_texts_have_the_tokens_and_lists_of_tokens_the_texts_that_short_ones_have(
    http: httpx.AsyncClient, tokenizer: Tokenizer
) -> None:
    text = "héllo wörld 日本語 " * 1000
    found = (await http.post("/tokenize", json={"prompt": text})).json()
    assert found["tokens"] == tokenizer.encode(text) == tokenizer._backend.encode(text).ids
    assert (await http.post("/detokenize", json={"tokens": found["tokens"]})).json()["prompt"] == text


async def test_a_text_that_no_context_could_hold_is_rejected_before_it_is_tokenized(http: httpx.AsyncClient) -> None:
    """Where nothing is known of its fewest tokens: it would be truncated."""
    body = {"prompt": " " * (2 << 20), "truncate_prompt_tokens": 5}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 400 and "at most 1048576 are tokenized" in answer.text
