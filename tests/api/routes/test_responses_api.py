"""/v1/responses as openai-python sends and reads it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import openai
import pydantic
import pytest

from lorafleet.api.routes.build_api import ROUTES
from lorafleet.api.routes.openapi import openapi
from lorafleet.api.text.tokenizer import Tokenizer

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather at a place.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    "strict": True,
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"place": "Oslo"}}\n</tool_call>'
DOCUMENT = openapi(ROUTES)


def prompt(engine: Any, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


def test_a_text_is_answered(client: openai.OpenAI, engine: Any, tokenizer: Tokenizer) -> None:
    response = client.responses.create(
        model="sql", input="hi", instructions="Be kind.", temperature=0.5, metadata={"a": "b"}, store=False
    )
    assert (response.output_text, response.status, response.model) == ("sql wörld 🎉", "completed", "sql")
    assert (response.instructions, response.metadata, response.temperature) == ("Be kind.", {"a": "b"}, 0.5)
    assert response.output[0].type == "message"
    assert response.usage is not None
    assert response.usage.input_tokens == len(engine.requests[0].prompt_token_ids)
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert prompt(engine, tokenizer).startswith(
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>"
    )
    body = response.model_dump(exclude_unset=True)
    jsonschema.validate(body, {"$ref": "#/components/schemas/ResponseBody", **DOCUMENT})


def test_a_conversation_goes_on_with_what_was_answered(
    client: openai.OpenAI, engine: Any, tokenizer: Tokenizer
) -> None:
    first = client.responses.create(model="llama", input="hi")
    history: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        *first.output,
        {"role": "user", "content": "and?"},
    ]
    client.responses.create(model="llama", input=history)
    expected = "user\nhi<|im_end|>\n<|im_start|>assistant\nbase wörld 🎉<|im_end|>\n<|im_start|>user\nand?<|im_end|>"
    assert expected in prompt(engine, tokenizer)


def test_an_answer_that_the_limit_cuts_off_is_incomplete(client: openai.OpenAI) -> None:
    response = client.responses.create(model="llama", input="hi", max_output_tokens=3)
    assert (response.status, response.output[0].status) == ("incomplete", "incomplete")  # type: ignore[union-attr]
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


def test_vllms_fields_say_how_tokens_are_drawn(client: openai.OpenAI, engine: Any) -> None:
    """`vllm bench serve` sends some of them."""
    asked = {"ignore_eos": True, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.5, "seed": 3, "stop": ["rld"]}
    response = client.responses.create(model="sql", input="hi", extra_body=asked)
    assert response.output_text == "sql wö"
    params = engine.requests[-1].params
    assert {name: getattr(params, name) for name in asked} == asked


@pytest.mark.usefixtures("shown")
def test_an_inputs_tokens_are_counted_as_an_answer_would_count_them(client: openai.OpenAI, engine: Any) -> None:
    asked: Any = {"model": "sql", "input": "Oslo?", "instructions": "Be kind.", "tools": [WEATHER]}
    counted = client.responses.input_tokens.count(**asked)
    assert not engine.requests
    answer = client.responses.create(**asked)
    assert answer.usage is not None
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", answer.usage.input_tokens)
    with pytest.raises(openai.BadRequestError, match=r"`input\.0`"):
        client.responses.input_tokens.count(model="sql", input=[{"type": "item_reference", "id": "x"}])
    assert client.responses.input_tokens.count(model="sql", input="x" * 9000).input_tokens > 9000  # over the context


def test_a_stream_has_openais_events_in_their_order(client: openai.OpenAI) -> None:
    events: list[Any] = list(client.responses.create(model="sql", input="hi", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[0].response.status == "in_progress"
    assert events[0].response.output == []
    assert "".join(event.delta for event in events[4:-4]) == events[-4].text == "sql wörld 🎉"
    assert events[-1].response.output_text == "sql wörld 🎉"
    assert events[-1].response.usage.output_tokens > 0
    assert {event.item_id for event in events[3:-2]} == {events[-1].response.output[0].id}


def test_the_stream_helper_reads_it(client: openai.OpenAI) -> None:
    with client.responses.stream(model="sql", input="hi") as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(texts) == final.output_text == "sql wörld 🎉"


@pytest.mark.usefixtures("shown")
@pytest.mark.parametrize("stream", [False, True])
def test_the_models_calls_are_items_of_their_own(client: openai.OpenAI, engine: Any, stream: bool) -> None:
    engine.answer = lambda _: "Let me see.\n" + CALL
    answer: Any = client.responses.create(model="llama", input="Oslo?", tools=[WEATHER], stream=stream)
    if stream:
        events = list(answer)
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        done = next(event for event in events if event.type == "response.function_call_arguments.done")
        assert "".join(deltas) == done.arguments == '{"place": "Oslo"}'
        answer = events[-1].response
    text, call = answer.output
    assert (text.content[0].text, text.status) == ("Let me see.", "completed")
    assert (call.type, call.name, call.arguments) == ("function_call", "get_weather", '{"place": "Oslo"}')
    assert call.status == "completed"


@pytest.mark.usefixtures("shown")
def test_calls_and_their_results_go_back(client: openai.OpenAI, engine: Any, tokenizer: Tokenizer) -> None:
    engine.answer = lambda _: "Let me see." + CALL
    first = client.responses.create(model="llama", input="Oslo?", tools=[WEATHER])
    call: Any = first.output[1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "-5"}
    history: Any = [{"role": "user", "content": "Oslo?"}, *first.output, result]
    engine.answer = lambda _: "Cold."
    second = client.responses.create(model="llama", input=history, tools=[WEATHER])
    assert second.output_text == "Cold."
    written = prompt(engine, tokenizer)
    assert f"<|im_start|>assistant\nLet me see.{CALL.replace(chr(10), '')}<|im_end|>" in written
    assert "<tool_response>-5</tool_response>" in written


@pytest.mark.usefixtures("shown")
def test_a_named_function_is_forced(client: openai.OpenAI, engine: Any) -> None:
    engine.answer = lambda _: '{"place": "Oslo"}'
    choice: Any = {"type": "function", "name": "get_weather"}
    call: Any = client.responses.create(model="llama", input="?", tools=[WEATHER], tool_choice=choice).output[0]
    assert (call.name, call.arguments) == ("get_weather", '{"place": "Oslo"}')
    assert json.loads(engine.requests[-1].params.structured_outputs.source) == WEATHER["parameters"]


def test_parse_reads_the_answer_into_a_model(client: openai.OpenAI, engine: Any) -> None:
    class Person(pydantic.BaseModel):
        name: str
        age: int

    engine.answer = lambda _: '{"name": "Ada", "age": 36}'
    response = client.responses.parse(model="llama", input="Who?", text_format=Person)
    assert response.output_parsed == Person(name="Ada", age=36)
    asked = engine.requests[-1].params.structured_outputs
    assert asked.kind == "json_schema"
    assert json.loads(asked.source)["required"] == ["name", "age"]


def test_an_adapter_that_fell_back_says_so(client: openai.OpenAI, engine: Any) -> None:
    engine.fallback_reason = "no such file"
    answer: Any = client.responses.create(model="sql", input="hi")
    assert (answer.model, answer.lora_fallback["reason"]) == ("llama", "no such file")


async def test_a_failure_within_a_stream_is_an_event_of_its_own(http: httpx.AsyncClient, engine: Any) -> None:
    engine.fail_after = 2
    response = await http.post("/v1/responses", json={"model": "llama", "input": "hi", "stream": True})
    last = response.text.strip().split("\n\n")[-1]
    assert last.startswith("event: error\ndata: ")
    assert json.loads(last.partition("data: ")[2])["message"] == "the engine tripped"


async def test_a_failure_before_the_first_token_has_a_status(http: httpx.AsyncClient, engine: Any) -> None:
    engine.fail_after = 0
    response = await http.post("/v1/responses", json={"model": "llama", "input": "hi", "stream": True})
    assert (response.status_code, response.json()["error"]["message"]) == (500, "the engine tripped")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "c"}, "conversation"),
    ({"background": True, "store": False}, "store"),
    ({"reasoning": {"effort": "low"}}, "reasoning"),
    ({"truncation": "auto"}, "truncation"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [{"type": "web_search_call", "id": "x"}]}, "input.0.type"),
    ({"input": [{"type": "reasoning", "summary": [{"type": "text"}]}]}, "input.0.summary.0"),
    ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input.0.encrypted_content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type"),
    ({"input": [{"role": "user", "content": "x", "name": "y"}]}, "input.0.name"),
    ({"input": [{"role": "villain", "content": "x"}]}, "input"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "f"}]}, "input.0.arguments"),
    ({"input": "x" * 3000}, "input"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10**6}, "input"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"tools": [{"type": "web_search"}]}, "tools.0"),
    ({"messages": []}, "messages"),
]


@pytest.mark.parametrize(("body", "param"), REFUSED)
async def test_what_is_not_served_is_refused_by_name(http: httpx.AsyncClient, body: dict[str, Any], param: str) -> None:
    response = await http.post("/v1/responses", json={"model": "llama", "input": "hi"} | body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
