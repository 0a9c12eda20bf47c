"""Requests as OpenAI's specification and openai-python have them: each is served, or refused by the field's name."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pydantic
import pytest

from lorafleet.api.text.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("shown")

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
HI: Any = {"role": "user", "content": "hi"}
PARAMETERS: Any = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS, "strict": None}}
NOW: Any = {"type": "function", "function": {"name": "now"}}
CALL: Any = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
FLAT_WEATHER: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
FLAT_NOW: Any = {"type": "function", "name": "now", "parameters": None, "strict": None}
FLAT_CALL: Any = {"type": "function_call", "call_id": "1", "name": "now", "arguments": "{}"}
LOGPROBS = "message.output_text.logprobs"


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def flat_allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name} for name in names]}


SERVED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [{"role": "developer", "content": "Be kind."}, HI]}),
    (CHAT, {"max_completion_tokens": 3, "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "user": "u"}),
    (CHAT, {"safety_identifier": "s", "prompt_cache_key": "k", "prompt_cache_options": {"mode": "implicit"}}),
    (CHAT, {"prediction": {"type": "content", "content": "x"}, "verbosity": "medium", "modalities": ["text"]}),
    (CHAT, {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}}),
    (CHAT, {"logprobs": True, "top_logprobs": 2, "n": 2, "stop": ["a", "b"], "logit_bias": {"5": 1}, "seed": 1}),
    (CHAT, {"tools": [WEATHER], "tool_choice": "auto", "parallel_tool_calls": True}),
    (CHAT, {"messages": [HI, {"role": "assistant", "content": None, "tool_calls": [CALL]}]}),
    (CHAT, {"messages": [HI, {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "noon"}]}]}),
    (CHAT, {"messages": [HI, {"role": "assistant", "content": "x", "refusal": None, "annotations": []}]}),
    (
        CHAT,
        {
            "messages": [
                HI | {"content": [{"type": "text", "text": "x", "prompt_cache_breakpoint": {"mode": "explicit"}}]}
            ]
        },
    ),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": None}}}),
    (CHAT, {"tools": [{"type": "custom", "custom": {"name": "c", "format": {"type": "text"}}}]}),
    (RESPONSES, {"tools": [{"type": "custom", "name": "c"}, FLAT_NOW]}),
    (RESPONSES, {"input": [HI, {"type": "custom_tool_call", "call_id": "1", "name": "c", "input": "x"}]}),
    (RESPONSES, {"stream": True, "stream_options": {"include_obfuscation": False}}),
    (RESPONSES, {"text": {"format": {"type": "text"}, "verbosity": "medium"}}),
    (RESPONSES, {"reasoning": {"effort": None, "summary": None}, "max_tool_calls": 3, "service_tier": "default"}),
    (RESPONSES, {"include": ["reasoning.encrypted_content", "file_search_call.results"]}),
    (RESPONSES, {"input": [FLAT_CALL, {"type": "function_call_output", "call_id": "1", "output": "noon"}]}),
    (RESPONSES, {"input": [{"role": "assistant", "content": "x", "phase": "final_answer"}, HI]}),
    (RESPONSES, {"tools": [FLAT_WEATHER, FLAT_NOW], "tool_choice": "auto"}),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 7, "temperature": 0, "stream": True}),
    ("/v1/embeddings", {"input": "hi", "encoding_format": "float"}),
]


def whole(path: str, body: dict[str, Any]) -> dict[str, Any]:
    least: dict[str, Any] = {CHAT: {"messages": [HI]}, RESPONSES: {"input": "hi"}}.get(path, {})
    return {"model": "llama", **least, **body}


@pytest.mark.parametrize(("path", "body"), SERVED)
async def test_what_openais_clients_send_is_served(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    response = await http.post(path, json=whole(path, body))
    assert response.status_code == 200, response.text


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        CHAT,
        {"messages": [HI | {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content.0.type",
    ),
    (CHAT, {"messages": [HI, {"role": "assistant", "content": None, "refusal": "no"}]}, "messages.1.refusal"),
    (CHAT, {"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    (CHAT, {"reasoning_effort": "low"}, "reasoning_effort"),
    (CHAT, {"verbosity": "low"}, "verbosity"),
    (CHAT, {"tools": [NOW], "tool_choice": {"type": "custom", "custom": {"name": "c"}}}, "tool_choice"),
    (CHAT, {"tools": [NOW], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    (CHAT, {"tools": [NOW], "tool_choice": allowed("auto", "weather")}, "tool_choice"),
    (CHAT, {"tool_choice": allowed("auto", "weather")}, "tool_choice"),
    (CHAT, {"tools": [NOW], "tool_choice": allowed("sometimes", "now")}, "tool_choice.allowed_tools.mode"),
    (RESPONSES, {"input": [HI | {"content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content.0.type"),
    (
        RESPONSES,
        {"input": [HI | {"content": [{"type": "input_text", "text": "x", "lang": "x"}]}]},
        "input.0.content.0.lang",
    ),
    (RESPONSES, {"input": [{"type": "function_call_output", "call_id": "1", "output": 5}]}, "input.0.output"),
    (RESPONSES, {"tools": [{"type": "file_search", "vector_store_ids": ["v"]}]}, "tools.0"),
    (RESPONSES, {"tools": [FLAT_NOW], "tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
    (RESPONSES, {"reasoning": {"summary": "concise"}}, "reasoning.summary"),
    (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity"),
    (RESPONSES, {"text": {"format": {"type": "grammar"}}}, "text.format"),
    (RESPONSES, {"include": ["message.output_text.feelings"]}, "include.0"),
    (RESPONSES, {"top_logprobs": 2}, "top_logprobs"),
    (RESPONSES, {"include": [LOGPROBS], "top_logprobs": 21}, "top_logprobs"),
    (RESPONSES, {"include": [LOGPROBS], "tools": [FLAT_NOW]}, "include"),
]


@pytest.mark.parametrize(("path", "body", "param"), REFUSED)
async def test_what_is_not_served_is_refused_by_name(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    response = await http.post(path, json=whole(path, body))
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_the_model_is_shown_the_allowed_tools_alone(client: openai.OpenAI, engine: Any, tokenizer: Tokenizer) -> None:
    engine.answer = lambda _: '[{"name": "now", "parameters": {}}]'
    choice: Any = allowed("required", "now")
    answer = client.chat.completions.create(model="llama", messages=[HI], tools=[WEATHER, NOW], tool_choice=choice)
    assert [call.function.name for call in answer.choices[0].message.tool_calls or []] == ["now"]  # type: ignore[union-attr]  # no custom ones
    request = engine.requests[-1]
    assert "weather" not in tokenizer.decode(request.prompt_token_ids)
    assert "weather" not in request.params.structured_outputs.source

    choice = flat_allowed("auto", "weather")
    engine.answer = lambda _: '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    response = client.responses.create(model="llama", input="hi", tools=[FLAT_WEATHER, FLAT_NOW], tool_choice=choice)
    assert [item.type for item in response.output] == ["message"]  # it may not be called
    assert response.tool_choice.to_dict() == choice  # type: ignore[union-attr]  # no text


class Person(pydantic.BaseModel):
    name: str


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # openai-python's own, of what it sends back
def test_a_parsed_message_may_be_sent_back(client: openai.OpenAI, engine: Any, tokenizer: Tokenizer) -> None:
    engine.answer = lambda _: '{"name": "Ada"}'
    message = client.chat.completions.parse(model="llama", messages=[HI], response_format=Person).choices[0].message
    assert message.parsed == Person(name="Ada")
    client.chat.completions.create(model="llama", messages=[HI, message, HI])  # type: ignore[list-item]  # as its guide has it
    assert 'assistant\n{"name": "Ada"}<|im_end|>' in tokenizer.decode(
        engine.requests[-1].prompt_token_ids, skip_special_tokens=False
    )


def test_a_calls_result_may_be_texts(client: openai.OpenAI, engine: Any, tokenizer: Tokenizer) -> None:
    output = [{"type": "input_text", "text": "noon"}, {"type": "input_text", "text": "sharp"}]
    history: Any = [HI, FLAT_CALL, {"type": "function_call_output", "call_id": "1", "output": output}]
    client.responses.create(model="llama", input=history, tools=[FLAT_NOW])
    assert "noon\nsharp" in tokenizer.decode(engine.requests[-1].prompt_token_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_responses_have_the_logprobs_of_every_token(
    client: openai.OpenAI, engine: Any, tokenizer: Tokenizer, stream: bool
) -> None:
    engine.answer = lambda _: "wörld 🎉"
    answer: Any = client.responses.create(model="llama", input="hi", include=[LOGPROBS], top_logprobs=2, stream=stream)  # type: ignore[list-item]  # a Literal
    if stream:
        events = list(answer)
        streamed = [entry for event in events if event.type.endswith("text.delta") for entry in event.logprobs]
        answer = events[-1].response
    entries = answer.output[0].content[0].logprobs
    tokens = [*tokenizer.encode("wörld 🎉"), tokenizer.eos_token_id or 0]
    assert [entry.token for entry in entries] == [tokenizer.token_text(token) for token in tokens]
    assert b"".join(bytes(entry.bytes) for entry in entries[:-1]).decode() == "wörld 🎉"
    assert {(entry.logprob, len(entry.top_logprobs)) for entry in entries} == {(-0.5, 2)}
    if stream:
        assert [entry.token for entry in streamed] == [entry.token for entry in entries[: len(streamed)]]
        assert len(entries) - len(streamed) <= 1  # of the end, which is no text


async def test_nulls_stand_where_the_specification_has_them_alone(http: httpx.AsyncClient) -> None:
    chat = (await http.post(CHAT, json=whole(CHAT, {}))).json()
    assert "system_fingerprint" not in chat  # a string, or not there
    tool = {"type": "function", "name": "f"}
    response = (await http.post(RESPONSES, json=whole(RESPONSES, {"tools": [tool]}))).json()
    assert response["tools"] == [tool | {"parameters": None, "strict": None}]  # both are required
