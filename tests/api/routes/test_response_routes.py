"""Stored responses as openai-python reads, continues, cancels and deletes them."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import jsonschema
import msgspec
import openai
import pytest

from lorafleet.api.access.access import Access
from lorafleet.api.access.caller import Caller
from lorafleet.api.access.gate import Gate, KnownKey
from lorafleet.api.app_state import AppState, make_state
from lorafleet.api.routes.build_api import ROUTES
from lorafleet.api.routes.openapi import openapi
from lorafleet.api.routes.response_storing import MAX_BACKGROUND
from lorafleet.api.stored.response_query import AskReplicas, ResponseFound, ResponseQuery
from lorafleet.api.text.tokenizer import Tokenizer

DOCUMENT = openapi(ROUTES)


@pytest.fixture
def serve(
    holder: Any, front: AppState, base_url: str, tokenizer: Tokenizer, engine: Any
) -> Iterator[Callable[..., AppState]]:
    made: list[AppState] = []

    def start(access: Access | None = None, ask: AskReplicas | None = None, **config: Any) -> AppState:
        made.append(
            make_state(
                replace(front.config, **config), tokenizer, engine, front.models.catalog, access, ask_replicas=ask
            )
        )
        holder.front = made[-1]
        return made[-1]

    assert base_url
    yield start
    for state in made:
        state.close()


def prompt(engine: Any, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


async def ended(client: openai.AsyncOpenAI, response: Any) -> Any:
    while response.status == "in_progress":
        await asyncio.sleep(0.01)
        response = await client.responses.retrieve(response.id)
    return response


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_stored_and_deleted(client: openai.OpenAI, stream: bool) -> None:
    answer: Any = client.responses.create(model="sql", input="hi", metadata={"a": "b"}, stream=stream)
    answered = [*answer][-1].response if stream else answer
    assert answered.store is True
    found = client.responses.retrieve(answered.id)
    assert found.model_dump() == answered.model_dump()
    jsonschema.validate(found.model_dump(exclude_unset=True), {"$ref": "#/components/schemas/ResponseBody", **DOCUMENT})
    client.responses.delete(found.id)
    with pytest.raises(openai.NotFoundError, match="There is no response"):
        client.responses.retrieve(found.id)


def test_what_is_not_to_be_stored_is_not(client: openai.OpenAI) -> None:
    response: Any = client.responses.create(model="sql", input="hi", store=False)
    assert response.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_on_from_a_stored_response(
    client: openai.OpenAI, engine: Any, tokenizer: Tokenizer, stream: bool
) -> None:
    first = client.responses.create(model="llama", input="hi", instructions="Be kind.")
    second: Any = client.responses.create(
        model="llama", input=[{"role": "user", "content": "and?"}], previous_response_id=first.id, stream=stream
    )
    second = [*second][-1].response if stream else second
    assert second.previous_response_id == first.id
    client.responses.delete(first.id)  # The second response has its conversation.
    client.responses.create(model="llama", input="so?", previous_response_id=second.id, store=False)
    turns = "".join(
        f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\nbase wörld 🎉<|im_end|>\n"
        for text in ("hi", "and?")
    )
    assert f"{turns}<|im_start|>user\nso?<|im_end|>" in prompt(engine, tokenizer)
    assert "Be kind." not in prompt(engine, tokenizer)
    with pytest.raises(openai.BadRequestError, match="There is no response"):
        client.responses.create(model="llama", input="x", previous_response_id=first.id)


@pytest.mark.usefixtures("shown")
def test_the_result_of_a_stored_call_goes_on(client: openai.OpenAI, engine: Any, tokenizer: Tokenizer) -> None:
    tool: Any = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}
    engine.answer = lambda _: '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    first = client.responses.create(model="llama", input="When?", tools=[tool])
    call: Any = first.output[0]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    client.responses.create(model="llama", input=[result], previous_response_id=first.id, tools=[tool])
    written = prompt(engine, tokenizer)
    assert '<tool_call>{"name": "now"' in written and "<tool_response>noon</tool_response>" in written


def test_the_input_items_of_a_response_are_listed(client: openai.OpenAI) -> None:
    items: Any = [{"role": "user", "content": str(i)} for i in range(5)]
    first = client.responses.create(model="llama", input=items)
    listed = list(client.responses.input_items.list(first.id, limit=2))  # The client reads all pages.
    assert [item.content[0].text for item in listed] == ["4", "3", "2", "1", "0"]  # type: ignore[union-attr]
    assert len({item.id for item in listed}) == 5
    page = client.responses.input_items.list(first.id, order="asc", after=listed[1].id)  # type: ignore[arg-type]
    assert [item.content[0].text for item in page.data] == ["4"]  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError, match="after"):
        client.responses.input_items.list(first.id, after="nothing")


async def test_a_response_in_the_background_is_polled(async_client: openai.AsyncOpenAI, engine: Any) -> None:
    engine.hold_after = 2
    begun = await async_client.responses.create(model="sql", input="hi", background=True)
    assert (begun.status, begun.background, begun.output) == ("in_progress", True, [])
    with pytest.raises(openai.BadRequestError, match="has not ended yet"):
        await async_client.responses.create(model="sql", input="x", previous_response_id=begun.id)
    engine.released = True
    done = await ended(async_client, begun)
    assert (done.status, done.output_text, done.id) == ("completed", "sql wörld 🎉", begun.id)
    assert done.usage.output_tokens == len(engine.tokenizer.encode("sql wörld 🎉")) + 1
    assert (await async_client.responses.cancel(done.id)).status == "completed"


async def test_a_response_in_the_background_is_canceled(async_client: openai.AsyncOpenAI, engine: Any) -> None:
    engine.hold_after = 2
    begun = await async_client.responses.create(model="sql", input="hi", background=True)
    canceled = await async_client.responses.cancel(begun.id)
    assert (canceled.status, engine.running) == ("cancelled", set())
    assert (await async_client.responses.retrieve(begun.id)).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="canceled or has failed"):
        await async_client.responses.create(model="sql", input="x", previous_response_id=begun.id)
    engine.hold_after = None
    foreground = await async_client.responses.create(model="sql", input="hi")
    with pytest.raises(openai.BadRequestError, match="background"):
        await async_client.responses.cancel(foreground.id)


async def test_a_response_in_the_background_is_deleted_while_it_runs(
    async_client: openai.AsyncOpenAI, engine: Any
) -> None:
    engine.hold_after = 1
    begun = await async_client.responses.create(model="sql", input="hi", background=True)
    await async_client.responses.delete(begun.id)
    assert engine.running == set()
    with pytest.raises(openai.NotFoundError):
        await async_client.responses.retrieve(begun.id)


async def test_a_failure_in_the_background_is_a_status(async_client: openai.AsyncOpenAI, engine: Any) -> None:
    engine.fail_after = 2
    failed = await ended(async_client, await async_client.responses.create(model="sql", input="hi", background=True))
    assert (failed.status, failed.error.message) == ("failed", "the engine tripped")
    body = failed.model_dump(exclude_unset=True)
    jsonschema.validate(body, {"$ref": "#/components/schemas/ResponseBody", **DOCUMENT})


async def test_a_stream_in_the_background_goes_on_where_the_client_left_it(
    async_client: openai.AsyncOpenAI, engine: Any
) -> None:
    engine.pause_s = 0.01
    stream = await async_client.responses.create(model="sql", input="hi", background=True, stream=True)
    seen: list[Any] = []
    async for event in stream:
        seen.append(event)
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    begun, last = seen[0].response.id, seen[-1].sequence_number
    seen += [event async for event in await async_client.responses.retrieve(begun, stream=True, starting_after=last)]
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert seen[-1].type == "response.completed"
    assert "".join(event.delta for event in seen if event.type == "response.output_text.delta") == "sql wörld 🎉"
    again = [event async for event in await async_client.responses.retrieve(begun, stream=True)]
    assert [event.type for event in again] == [event.type for event in seen]
    unstreamed = await async_client.responses.create(model="sql", input="hi")
    with pytest.raises(openai.BadRequestError, match="stream"):
        await async_client.responses.retrieve(unstreamed.id, stream=True)


async def test_responses_in_the_background_are_bounded(async_client: openai.AsyncOpenAI, engine: Any) -> None:
    engine.hold_after = 0
    begun = [
        await async_client.responses.create(model="sql", input="hi", background=True) for _ in range(MAX_BACKGROUND)
    ]
    with pytest.raises(openai.RateLimitError, match="background responses"):
        await async_client.responses.create(model="sql", input="hi", background=True)
    for response in begun:
        await async_client.responses.delete(response.id)
    engine.hold_after = None
    again = await async_client.responses.create(model="sql", input="hi", background=True)
    assert (await ended(async_client, again)).status == "completed"


@pytest.mark.parametrize("as_header", [False, True])
async def test_an_id_given_twice_loses_no_response(
    async_client: openai.AsyncOpenAI, engine: Any, as_header: bool
) -> None:
    more: Any = {"extra_headers": {"X-Request-Id": "mine"}} if as_header else {"extra_body": {"request_id": "mine"}}
    name = "X-Request-Id" if as_header else "request_id"
    create = async_client.responses.create
    engine.hold_after = 2
    begun = await create(model="sql", input="hi", background=True, **more)
    for background in (True, False):
        with pytest.raises(openai.BadRequestError, match=f"`{name}` is 'mine'"):
            await create(model="sql", input="hi", background=background, **more)
    assert len(engine.running) == 1
    engine.released = True
    done = await ended(async_client, begun)
    assert (done.id, done.status) == ("resp_mine", "completed")
    with pytest.raises(openai.BadRequestError, match="stored already"):
        await create(model="sql", input="hi", **more)
    unstored = await create(model="sql", input="hi", store=False, **more)
    assert unstored.id == done.id
    await async_client.responses.delete(done.id)
    waiting = [asyncio.create_task(create(model="sql", input="hi", **more)) for _ in range(2)]
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert sorted(isinstance(end, openai.BadRequestError) for end in ends) == [False, True]


async def test_a_response_in_the_background_that_outgrows_the_store_fails_and_says_why(
    http: httpx.AsyncClient, serve: Any
) -> None:
    serve(response_store_bytes=30_000)  # Half of it has no room for the logprobs of the answer.
    body = {"model": "sql", "input": "hi", "background": True, "stream": True, "top_logprobs": 20}
    answer = await http.post("/v1/responses", json={**body, "include": ["message.output_text.logprobs"]})
    [*_, last] = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    event = json.loads(last)
    assert event["error"]["param"] == "starting_after"
    assert "no longer stored" in event["error"]["message"]


async def test_responses_belong_to_their_tenant(http: httpx.AsyncClient, serve: Any) -> None:
    scopes: Any = frozenset(("infer",))
    callers = {
        "one": Caller("acme", "k1", scopes, key_mark="mark of k1"),
        "two": Caller("acme", "k2", scopes, key_mark="mark of k2"),
        "spy": Caller("spy", "k3", scopes, key_mark="mark of k3"),
    }
    digests = {hashlib.sha256(key.encode()).hexdigest(): KnownKey(caller) for key, caller in callers.items()}
    serve(Access(Gate(keys=lambda: digests)))
    as_one, as_two, as_spy = ({"authorization": f"Bearer {key}"} for key in callers)
    made = (await http.post("/v1/responses", json={"model": "llama", "input": "hi"}, headers=as_one)).json()["id"]
    assert (await http.get(f"/v1/responses/{made}", headers=as_two)).status_code == 200
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        response = await http.request(method, f"/v1/responses/{made}{path}", headers=as_spy)
        assert response.status_code == 404, (method, path)
    body = {"model": "llama", "input": "hi", "previous_response_id": made}
    assert (await http.post("/v1/responses", json=body, headers=as_spy)).status_code == 400
    assert (await http.get(f"/v1/responses/{made}", headers=as_one)).status_code == 200


async def test_the_name_of_a_key_opens_no_responses_of_its_former_holder(http: httpx.AsyncClient, serve: Any) -> None:
    """Neither for the next key of that name, nor for one that is called like the operator's."""
    scopes: Any = frozenset(("infer",))
    callers = {
        "first": Caller(None, "app", scopes, key_mark="first's"),
        "second": Caller(None, "app", scopes, key_mark="second's"),
        "alike": Caller(None, "admin-key", scopes, key_mark="alike's"),
    }
    keys = {hashlib.sha256(key.encode()).hexdigest(): KnownKey(caller) for key, caller in callers.items()}
    serve(Access(Gate("the operator's", lambda: keys)))
    as_first, as_second, as_alike, as_operator = (
        {"authorization": f"Bearer {key}"} for key in (*callers, "the operator's")
    )
    for owner, others in ((as_first, [as_second]), (as_operator, [as_alike, as_first])):
        body = {"model": "llama", "input": "hi", "background": True}
        made = (await http.post("/v1/responses", json=body, headers=owner)).json()["id"]
        for other in others:
            assert (await http.get(f"/v1/responses/{made}", headers=other)).status_code == 404
            assert (await http.post(f"/v1/responses/{made}/cancel", headers=other)).status_code == 404
        assert (await http.get(f"/v1/responses/{made}", headers=owner)).status_code == 200
    body = {"model": "llama", "input": "hi", "request_id": "chosen"}
    statuses = [(await http.post("/v1/responses", json=body, headers=who)).status_code for who in (as_first,) * 2]
    assert statuses == [200, 400], "an owner has an ID once"
    assert (await http.post("/v1/responses", json=body, headers=as_second)).status_code == 200, "and another its own"


async def test_a_response_is_found_at_the_replica_that_has_it(
    async_client: openai.AsyncOpenAI, serve: Any, engine: Any, tokenizer: Tokenizer
) -> None:
    first = serve()
    stored = await async_client.responses.create(model="sql", input="hi")
    engine.hold_after = 2
    begun = await async_client.responses.create(model="sql", input="hi", background=True, stream=True)
    opened = await anext(aiter(begun))
    engine.hold_after = None
    server_loop = first.stored.store.get("clients without a key", opened.response.id).run._task.get_loop()

    async def ask(query: ResponseQuery) -> ResponseFound | None:
        assert asyncio.get_running_loop() is server_loop
        sent = msgspec.msgpack.decode(
            msgspec.msgpack.encode(query), type=ResponseQuery
        )  # It is sent from process to process.
        return await first.stored.find_here(sent)

    serve(ask=ask)
    assert (await async_client.responses.retrieve(stored.id)).output_text == "sql wörld 🎉"
    await async_client.responses.create(model="sql", input="and?", previous_response_id=stored.id)
    assert "assistant\nsql wörld 🎉<|im_end|>\n<|im_start|>user\nand?" in prompt(engine, tokenizer)
    assert (await async_client.responses.cancel(opened.response.id)).status == "cancelled"
    events = [event async for event in await async_client.responses.retrieve(opened.response.id, stream=True)]
    assert events[-1].type == "response.cancelled"
    await async_client.responses.delete(stored.id)
    with pytest.raises(openai.NotFoundError):
        await async_client.responses.retrieve(stored.id)


async def test_a_server_may_store_nothing(http: httpx.AsyncClient, serve: Any) -> None:
    serve(response_store_bytes=0)
    response = await http.post("/v1/responses", json={"model": "llama", "input": "hi"})
    assert response.json()["store"] is False
    for field, value in (("store", True), ("background", True), ("previous_response_id", "resp_1")):
        response = await http.post("/v1/responses", json={"model": "llama", "input": "hi", field: value})
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)
        assert "--response-store-bytes" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("?starting_after=1", "starting_after"),
        ("?stream=true&starting_after=-1", "starting_after"),
        ("?include=x", "include"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?order=random", "order"),
    ],
)
async def test_parameters_are_refused_by_name(http: httpx.AsyncClient, path: str, param: str) -> None:
    made = (await http.post("/v1/responses", json={"model": "llama", "input": "hi"})).json()["id"]
    response = await http.get(f"/v1/responses/{made}{path}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_response_in_the_background_outlives_its_request(http: httpx.AsyncClient, engine: Any) -> None:
    """Its client may leave a stream at any time."""
    engine.pause_s = 0.01
    body = {"model": "sql", "input": "hi", "background": True, "stream": True}
    async with http.stream("POST", "/v1/responses", json=body) as response:
        line = await anext(line async for line in response.aiter_lines() if line.startswith("data: "))
    made = json.loads(line.removeprefix("data: "))["response"]["id"]
    found: dict[str, Any] = {"status": "in_progress"}
    while found["status"] == "in_progress":
        await asyncio.sleep(0.01)
        found = (await http.get(f"/v1/responses/{made}")).json()
    assert found["status"] == "completed"


@pytest.mark.usefixtures("shown")
async def test_what_codex_sends_is_served(http: httpx.AsyncClient, engine: Any, tokenizer: Tokenizer) -> None:
    parameters = {"type": "object", "properties": {"command": {"type": "array", "items": {"type": "string"}}}}
    call = {"type": "function_call", "name": "shell", "arguments": '{"command": ["ls"]}', "call_id": "call_1"}
    body = {
        "model": "llama",
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I will."}]},
            call,
            {"type": "function_call_output", "call_id": "call_1", "output": "README.md"},
        ],
        "tools": [
            {"type": "function", "name": "shell", "description": "Runs.", "strict": False, "parameters": parameters}
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": None,
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199-session",
        "client_metadata": {"session_id": "0199-session", "x-codex-turn-metadata": '{"request_kind":"turn"}'},
    }
    engine.answer = lambda _: '<tool_call>\n{"name": "shell", "arguments": {"command": ["cat"]}}\n</tool_call>'
    response = await http.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    last = json.loads(response.text.strip().split("\n\n")[-1].partition("\ndata: ")[2])
    assert (last["type"], last["response"]["output"][0]["arguments"]) == ("response.completed", '{"command": ["cat"]}')
    assert "<tool_response>README.md</tool_response>" in prompt(engine, tokenizer)
