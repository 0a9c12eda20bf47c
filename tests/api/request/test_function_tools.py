"""Tool calls as openai-python sends and reads them, in each family's format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import openai
import pydantic
import pytest

from lorafleet.api.app_state import AppState, make_state
from lorafleet.api.text.tokenizer import Tokenizer
from tool_templates import TEMPLATES

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather at a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"$ref": "#/$defs/place"}, "unit": {"enum": ["C", "F"]}},
            "required": ["place"],
            "$defs": {"place": {"type": "string"}},
        },
    },
}
NOW: Any = {"type": "function", "function": {"name": "now"}}
ASK: Any = [{"role": "user", "content": "Is it cold in Oslo?"}]
ARGUMENTS = '{"place": "Oslo é"}'
ANSWERS = {
    "hermes": f'Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3_json": f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}; {{"name": "now", "parameters": {{}}}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ARGUMENTS}}}, '
    '{"name": "now", "arguments": {}}]',
}
TWO_CALLS = [("get_weather", ARGUMENTS), ("now", "{}")]


@pytest.fixture(params=TEMPLATES)
def family(
    request: Any,
    holder: Any,
    base_url: str,  # noqa: ARG001
    front: AppState,
    tokenizer: Tokenizer,
    engine: Any,
) -> Iterator[str]:
    """The server has the family's template, and the model answers with calls in its format."""
    engine.hello = msgspec.structs.replace(engine.hello, max_model_len=4096, kv_cache_tokens=8192)
    holder.front = make_state(
        replace(front.config, chat_template=TEMPLATES[request.param]), tokenizer, engine, front.models.catalog
    )
    engine.answer = lambda _: ANSWERS[request.param]
    yield request.param
    holder.front.close()


def last_prompt(engine: Any, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


def test_the_models_calls_are_read(client: openai.OpenAI, family: str, engine: Any, tokenizer: Tokenizer) -> None:
    choice = client.chat.completions.create(model="sql", messages=ASK, tools=[WEATHER, NOW]).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == ("Let me see." if family == "hermes" else None)
    calls: Any = choice.message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in calls] == TWO_CALLS
    assert {call.type for call in calls} == {"function"}
    assert len({call.id for call in calls}) == 2
    assert "The weather at a place." in last_prompt(engine, tokenizer)


def test_streamed_calls_join_to_the_whole_ones(client: openai.OpenAI, family: str) -> None:
    stream = client.chat.completions.create(model="llama", messages=ASK, tools=[WEATHER, NOW], stream=True, n=2)
    chunks = list(stream)
    for index in (0, 1):
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert choices[0].delta.role == "assistant"
        assert [one.finish_reason for one in choices] == [None] * (len(choices) - 1) + ["tool_calls"]
        content = "".join(one.delta.content or "" for one in choices)
        assert content == ("Let me see." if family == "hermes" else "")
        deltas: Any = [delta for one in choices for delta in one.delta.tool_calls or []]
        joined = [["", ""], ["", ""]]
        for delta in deltas:
            if delta.id is not None:  # the first of a call has its id and name, the others have neither
                assert (delta.type, delta.function.arguments) == ("function", "")
                joined[delta.index][0] = delta.function.name
            else:
                assert delta.function.name is None
                joined[delta.index][1] += delta.function.arguments
        assert [(name, arguments) for name, arguments in joined] == TWO_CALLS
        assert len(deltas) > 6  # they came in pieces


@pytest.mark.usefixtures("family")
def test_the_stream_helper_puts_calls_together(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="llama", messages=ASK, tools=[WEATHER, NOW]) as stream:
        kinds = {event.type for event in stream}
        calls = stream.get_final_completion().choices[0].message.tool_calls
    assert "tool_calls.function.arguments.done" in kinds
    assert [(call.function.name, call.function.arguments) for call in calls or []] == TWO_CALLS


def test_calls_and_their_results_go_back_through_the_template(
    client: openai.OpenAI, family: str, engine: Any, tokenizer: Tokenizer
) -> None:
    answer = client.chat.completions.create(
        model="llama", messages=ASK, tools=[WEATHER, NOW], parallel_tool_calls=False
    )
    message = answer.choices[0].message
    (call,) = message.tool_calls or []
    history = [*ASK, message, {"role": "tool", "tool_call_id": call.id, "content": "-5"}]
    engine.answer = lambda _: "Yes."
    after = client.chat.completions.create(model="llama", messages=history, tools=[WEATHER])
    assert (after.choices[0].message.content, after.choices[0].message.tool_calls) == ("Yes.", None)
    assert after.choices[0].finish_reason == "stop"
    prompt = last_prompt(engine, tokenizer)
    arguments = "parameters" if family == "llama3_json" else "arguments"
    assert f'{{"name": "get_weather", "{arguments}": {{"place": "Oslo é"}}' in prompt
    assert "-5" in prompt


def test_a_model_that_is_not_to_call_is_told_of_no_tools(
    client: openai.OpenAI, family: str, engine: Any, tokenizer: Tokenizer
) -> None:
    choice = client.chat.completions.create(model="llama", messages=ASK, tools=[WEATHER], tool_choice="none").choices[0]
    assert (choice.message.content, choice.message.tool_calls) == (ANSWERS[family], None)
    assert "The weather at a place." not in last_prompt(engine, tokenizer)


@pytest.mark.parametrize("family", ["hermes"], indirect=True)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.usefixtures("family")
def test_a_named_function_is_forced_by_its_schema(client: openai.OpenAI, engine: Any, stream: bool) -> None:
    engine.answer = lambda _: ARGUMENTS
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    answer: Any = client.chat.completions.create(
        model="llama", messages=ASK, tools=[NOW, WEATHER], tool_choice=named, stream=stream
    )
    if stream:
        chunks = list(answer)
        deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or []]
        call = (deltas[0].function.name, "".join(delta.function.arguments for delta in deltas))
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
    else:
        function = answer.choices[0].message.tool_calls[0].function
        call = (function.name, function.arguments)
        assert answer.choices[0].finish_reason == "tool_calls"
    assert call == TWO_CALLS[0]
    forced = engine.requests[-1].params.structured_outputs
    assert (forced.kind, json.loads(forced.source)) == ("json_schema", WEATHER["function"]["parameters"])


@pytest.mark.parametrize("family", ["mistral"], indirect=True)
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.usefixtures("family")
def test_required_calls_are_forced_by_a_schema_of_all(client: openai.OpenAI, engine: Any, parallel: bool) -> None:
    engine.answer = lambda _: (
        f'[{{"name": "get_weather", "parameters": {ARGUMENTS}}}, {{"name": "now", "parameters": {{}}}}]'
    )
    answer = client.chat.completions.create(
        model="llama", messages=ASK, tools=[WEATHER, NOW], tool_choice="required", parallel_tool_calls=parallel
    )
    calls: Any = answer.choices[0].message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in calls] == TWO_CALLS[: 2 if parallel else 1]
    schema = json.loads(engine.requests[-1].params.structured_outputs.source)
    assert schema.get("maxItems") == (None if parallel else 1)
    assert [one["properties"]["name"]["const"] for one in schema["items"]["anyOf"]] == ["get_weather", "now"]
    moved = schema["$defs"]["tool_0"]["properties"]["place"]["$ref"]
    assert moved == "#/$defs/tool_0/$defs/place"


@pytest.mark.parametrize("family", ["hermes"], indirect=True)
@pytest.mark.usefixtures("family")
def test_a_call_that_the_limit_cuts_off_ends_with_length(client: openai.OpenAI, engine: Any) -> None:
    engine.answer = lambda _: '[{"name": "get_weather", "parameters": {"place": "Os'
    tokens = len(engine.tokenizer.encode(engine.answer(None)))
    choice = client.chat.completions.create(
        model="llama", messages=ASK, tools=[WEATHER], tool_choice="required", max_tokens=tokens
    ).choices[0]
    assert choice.finish_reason == "length"
    call: Any = (choice.message.tool_calls or [])[0]
    assert call.function.arguments == '{"place": "Os'


@pytest.mark.parametrize("family", ["hermes"], indirect=True)
@pytest.mark.usefixtures("family")
def test_openai_pythons_parse_reads_arguments_into_models(client: openai.OpenAI, engine: Any) -> None:
    class GetWeather(pydantic.BaseModel):
        place: str

    engine.answer = lambda _: f'<tool_call>{{"name": "GetWeather", "arguments": {ARGUMENTS}}}</tool_call>'
    tool = openai.pydantic_function_tool(GetWeather)
    answer = client.chat.completions.parse(model="llama", messages=ASK, tools=[tool])
    parsed = (answer.choices[0].message.tool_calls or [])[0].function.parsed_arguments
    assert parsed == GetWeather(place="Oslo é")


def strictly(tool: Any) -> Any:
    return {"type": "function", "function": tool["function"] | {"strict": True}}


PLACE: Any = {
    "type": "json_schema",
    "json_schema": {
        "name": "place",
        "schema": {"type": "object", "properties": {"place": {"type": "string"}}, "additionalProperties": False},
    },
}


@pytest.mark.usefixtures("family")
def test_only_a_strict_function_or_a_format_forces_what_the_model_chooses(client: openai.OpenAI, engine: Any) -> None:
    def asked(**fields: Any) -> Any:
        answer = client.chat.completions.create(model="llama", messages=ASK, **fields)
        calls: Any = answer.choices[0].message.tool_calls or []
        assert {(call.function.name, call.function.arguments) for call in calls} <= set(TWO_CALLS)
        return engine.requests[-1].params.structured_outputs

    assert asked(tools=[WEATHER, NOW]) is None
    both = asked(tools=[strictly(WEATHER), NOW])
    assert (both.kind, both.param) == ("tagged", "tools")
    schemas = {rule: schema for rule, schema, *_ in json.loads(both.source)[1]}
    assert schemas == {"arguments_0": WEATHER["function"]["parameters"], "arguments_1": {"type": "object"}}
    assert asked(tools=[strictly(WEATHER), NOW], parallel_tool_calls=False) != both
    beside = json.loads(asked(tools=[NOW], response_format=PLACE).source)[1]
    assert [rule for rule, *_ in beside] == ["arguments_0", "formatted"]
    assert beside[1][1] == PLACE["json_schema"]["schema"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_beside_tools_is_a_call_or_what_its_format_says(
    client: openai.OpenAI, family: str, engine: Any, stream: bool
) -> None:
    calls = ANSWERS[family].removeprefix("Let me see.\n")
    for text in (ARGUMENTS, calls):
        engine.answer = lambda _, text=text: text
        answer: Any = client.chat.completions.create(
            model="llama", messages=ASK, tools=[WEATHER, NOW], response_format=PLACE, stream=stream
        )
        if stream:
            deltas = [chunk.choices[0].delta for chunk in answer]
            content: str | None = "".join(delta.content or "" for delta in deltas)
            names = [call.function.name for delta in deltas for call in delta.tool_calls or [] if call.id]
            assert len(deltas) > 8  # it came in pieces
        else:
            message = answer.choices[0].message
            content = message.content or ""
            names = [call.function.name for call in message.tool_calls or []]
        assert (content, names) == ((ARGUMENTS, []) if text == ARGUMENTS else ("", ["get_weather", "now"]))


@pytest.mark.parametrize("family", ["llama3_json"], indirect=True)
@pytest.mark.usefixtures("family")
async def test_a_format_that_could_begin_like_a_call_is_refused_beside_tools(http: httpx.AsyncClient) -> None:
    body = {"model": "llama", "messages": ASK, "tools": [NOW], "response_format": {"type": "json_object"}}
    error = (await http.post("/v1/chat/completions", json=body)).json()["error"]
    assert (error["param"], "additionalProperties" in error["message"]) == ("response_format", True)


@pytest.mark.parametrize("family", ["hermes"], indirect=True)
@pytest.mark.usefixtures("family")
def test_a_demanded_call_leaves_no_text_for_a_format(client: openai.OpenAI, engine: Any) -> None:
    engine.answer = lambda _: '[{"name": "now", "parameters": {}}]'
    for format in (PLACE, openai.omit):
        client.chat.completions.create(
            model="llama", messages=ASK, tools=[NOW], tool_choice="required", response_format=format
        )
    with_format, without = (request.params.structured_outputs for request in engine.requests[-2:])
    assert with_format == without


CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": "required"}, "tools"),
    ({"tools": [], "tool_choice": {"type": "function", "function": {"name": "now"}}}, "tools"),
    ({"tools": [NOW, NOW]}, "tools"),
    ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tools": [{"type": "web_search"}]}, "tools.0"),
    ({"tools": [strictly({"function": {"name": "f", "parameters": {"type": "string"}}})]}, "tools"),
    ({"tools": [NOW], "structured_outputs": {"regex": ".*"}}, "structured_outputs.regex"),
    ({"tools": [strictly(NOW)], "min_tokens": 3}, "min_tokens"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameter": {}}}]}, "tools.0.function.parameter"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"messages": [*ASK, {"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages.1.tool_calls.0"),
    ({"messages": [*ASK, {"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages.1.tool_calls"),
    (
        {
            "messages": [
                *ASK,
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}, "type": "function"}],
                },
            ]
        },
        "messages.1.tool_calls.0.function.arguments",
    ),
]


@pytest.mark.parametrize("family", ["hermes"], indirect=True)
@pytest.mark.usefixtures("family")
@pytest.mark.parametrize(("body", "param"), REFUSED)
async def test_wrong_tools_are_refused_by_name(http: httpx.AsyncClient, body: dict[str, Any], param: str) -> None:
    response = await http.post("/v1/chat/completions", json={"model": "llama", "messages": ASK} | body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_model_that_is_shown_no_tools_refuses_them(http: httpx.AsyncClient) -> None:
    body = {"model": "llama", "messages": ASK, "tools": [NOW]}
    error = (await http.post("/v1/chat/completions", json=body)).json()["error"]
    assert error["param"] == "tools"
    assert "--chat-template" in error["message"]


async def test_a_choice_of_the_models_needs_a_known_format(
    http: httpx.AsyncClient, holder: Any, front: AppState, tokenizer: Tokenizer, engine: Any
) -> None:
    config = replace(front.config, chat_template=TEMPLATES["hermes"], tool_call_parser="none")
    holder.front = make_state(config, tokenizer, engine, front.models.catalog)
    body = {"model": "llama", "messages": ASK, "tools": [NOW]}
    error = (await http.post("/v1/chat/completions", json=body)).json()["error"]
    assert error["param"] == "tool_choice"
    assert "--tool-call-parser" in error["message"]
    holder.front.close()


@pytest.mark.xdist_group("real_server")
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "set_unit"}}])
@pytest.mark.parametrize("model", ["llama", "sql"])
def test_a_random_model_makes_just_the_calls_that_are_demanded(real: Any, choice: Any, model: str) -> None:
    tool: Any = {
        "type": "function",
        "function": {
            "name": "set_unit",
            "parameters": {
                "type": "object",
                "properties": {"unit": {"$ref": "#/$defs/unit"}},
                "required": ["unit"],
                "additionalProperties": False,
                "$defs": {"unit": {"enum": ["C", "F"]}},
            },
        },
    }
    texts, before = real.front.texts, real.front.texts.chat_template
    texts.chat_template = "{{ tools | length }}{{ messages[0].content }}"
    try:
        with openai.OpenAI(base_url=real.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
            answer = client.chat.completions.create(
                model=model, messages=ASK[:1], tools=[tool], tool_choice=choice, parallel_tool_calls=False
            )
    finally:
        texts.chat_template = before
    (call,) = answer.choices[0].message.tool_calls or []
    assert isinstance(call, openai.types.chat.ChatCompletionMessageFunctionToolCall)
    assert call.function.name == "set_unit"
    assert json.loads(call.function.arguments)["unit"] in ("C", "F")
    assert answer.choices[0].finish_reason == "tool_calls"


UNIT: Any = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}},
    "required": ["unit"],
    "additionalProperties": False,
}
# format, what a forced answer begins with, whether it is calls beside a response_format
FORCED = [("llama3_json", "{", False), ("hermes", "<", True), ("mistral", "[", True), ("mistral", "{", True)]


@pytest.mark.xdist_group("real_server")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("name", "begins", "formatted"), FORCED)
def test_a_random_models_calls_of_its_own_match_too(
    real: Any, name: str, begins: str, formatted: bool, stream: bool
) -> None:
    """It is only pushed to begin one, and kept from blanks, which would fill the answer."""
    tokenizer = real.front.texts.tokenizer
    pushed = {tokenizer.encode(begins)[0]: 100.0}
    pushed |= {tokenizer.encode(blank)[0]: -100.0 for blank in " \t\n\r"}
    tool = {"type": "function", "function": {"name": "u", "parameters": UNIT, "strict": True}}
    asked = {"type": "json_schema", "json_schema": {"name": "unit", "schema": UNIT}} if formatted else None
    texts, before = real.front.texts, (real.front.texts.chat_template, real.front.texts.tool_call_parser)
    texts.chat_template, texts.tool_call_parser = "{{ tools | length }}{{ messages[0].content }}", name
    try:
        with openai.OpenAI(base_url=real.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
            answer: Any = client.chat.completions.create(
                model="sql",
                messages=ASK[:1],
                tools=[tool],
                parallel_tool_calls=False,
                stream=stream,
                logit_bias={str(token): bias for token, bias in pushed.items()},
                **({"response_format": asked} if asked else {}),
            )
            chunks = list(answer) if stream else []
    finally:
        texts.chat_template, texts.tool_call_parser = before
    if stream:
        deltas = [chunk.choices[0].delta for chunk in chunks]
        calls = [call.function for delta in deltas for call in delta.tool_calls or []]
        content = "".join(delta.content or "" for delta in deltas)
        called = [(call.name, "".join(c.arguments for c in calls)) for call in calls[:1]]
        ended = chunks[-1].choices[0].finish_reason
    else:
        message, ended = answer.choices[0].message, answer.choices[0].finish_reason
        content = message.content or ""
        called = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    if begins == "{" and formatted:
        assert (called, ended) == ([], "stop")
        written = content
    else:
        [(function, written)] = called
        assert (function, content, ended) == ("u", "", "tool_calls")
    assert json.loads(written)["unit"] in ("C", "F")
