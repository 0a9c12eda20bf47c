"""The bytes of streams, and how they reach the client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from starlette.types import Message

from lorafleet.api.answer.gathered_writes import set_body_sender
from lorafleet.api.answer.responses import DONE, EventStream

ENVELOPE = b'{"id":"ID","object":"KIND","created":0,"model":"llama","choices":['


def chunk(kind: str, choice: bytes) -> bytes:
    return b"data: " + ENVELOPE.replace(b"KIND", kind.encode()) + choice + b"]}\n\n"


def completion(text: bytes, finish_reason: bytes = b"null") -> bytes:
    choice = b'{"index":0,"text":"%s","logprobs":null,"finish_reason":%s,"stop_reason":null}' % (text, finish_reason)
    return chunk("text_completion", choice)


def chat(delta: bytes, finish_reason: bytes = b"null") -> bytes:
    choice = b'{"index":0,"delta":{%s},"logprobs":null,"finish_reason":%s,"stop_reason":null}' % (delta, finish_reason)
    return chunk("chat.completion.chunk", choice)


async def streamed(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> bytes:
    """Returns the whole stream, with the time and the ID replaced."""
    answer = await http.post(path, json={"model": "llama", "stream": True, **body})
    created = json.loads(answer.text.partition("\n")[0].removeprefix("data: "))["created"]
    text = answer.content.replace(b'"created":%d' % created, b'"created":0')
    return text.replace(b'"id":"cmpl-x"', b'"id":"ID"').replace(b'"id":"chatcmpl-x"', b'"id":"ID"')


async def test_a_client_that_keeps_up_gets_these_bytes(http: httpx.AsyncClient, engine: Any) -> None:
    engine.answer = lambda _: 'a"\u2028'
    pieces = [engine.tokenizer.token_text(token) for token in engine.tokenizer.encode(engine.answer(None))]
    assert pieces[:2] == ["a", '"']  # Later tokens are parts of one character.
    texts = [b"a", b'\\"', b"\\u2028"]
    assert await streamed(http, "/v1/completions", {"prompt": "x", "request_id": "x"}) == (
        b"".join(map(completion, texts)) + completion(b"", b'"stop"') + DONE
    )
    messages = [{"role": "user", "content": "x"}]
    assert await streamed(http, "/v1/chat/completions", {"messages": messages, "request_id": "x"}) == (
        chat(b'"role":"assistant","content":""')
        + b"".join(chat(b'"content":"%s"' % text) for text in texts)
        + chat(b"", b'"stop"')
        + DONE
    )


class Client:
    """The ASGI side of a client that leaves when the test says so."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.by_layers: list[Message] = []
        self.past_layers: list[Message] = []
        self.scope: dict[str, Any] = {"type": "http", "headers": []}
        set_body_sender(self.scope, self._send_past_layers)

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.by_layers.append(message)

    async def _send_past_layers(self, message: Message) -> None:
        self.past_layers.append(message)


async def test_layers_see_the_start_and_events_pass_them_by() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"
        yield DONE

    client = Client()
    await EventStream(events())(client.scope, client.receive, client.send)
    assert [message["type"] for message in client.by_layers] == ["http.response.start"]
    assert [(message["body"], message["more_body"]) for message in client.past_layers] == [
        (b"data: 1\n\n", True),
        (DONE, False),
    ]


@pytest.mark.parametrize("canceled", [True, False])
async def test_a_client_that_leaves_or_a_canceled_response_closes_the_events(canceled: bool) -> None:
    waits, closed = asyncio.Event(), asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield b"data: 1\n\n"
            waits.set()
            await asyncio.Event().wait()
        finally:
            closed.set()

    client = Client()
    response = asyncio.create_task(EventStream(events())(client.scope, client.receive, client.send))
    await waits.wait()
    if canceled:
        response.cancel()
        with pytest.raises(asyncio.CancelledError):
            await response
    else:
        client.left.set()
        await response  # Nobody is there who could be told, so this is no error.
    assert closed.is_set()


async def test_an_error_before_the_first_event_reaches_the_layers() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        raise ValueError("no event")
        yield b""

    client = Client()
    with pytest.raises(ValueError, match="no event"):
        await EventStream(events())(client.scope, client.receive, client.send)
    assert not client.by_layers and not client.past_layers
