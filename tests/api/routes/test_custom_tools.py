"""Custom tools, whose input is text, as openai-python sends and reads them in chats and responses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.api.tool_calls.custom_input import InputReader, arguments_of

RUN: Any = {"type": "custom", "name": "run", "description": "Runs Python."}
CHAT_RUN: Any = {"type": "custom", "custom": {"name": "run", "description": "Runs Python."}}
NOW: Any = {"type": "function", "name": "now", "parameters": None, "strict": None}
CODE = 'print("wörld 🎉")\n\tif a \\ b: pass'
CALL = f'<tool_call>\n{{"name": "run", "arguments": {json.dumps({"input": CODE})}}}\n</tool_call>'
ASK: Any = [{"role": "user", "content": "hi"}]


def grammar(syntax: str, definition: str) -> dict[str, Any]:
    return {"type": "grammar", "syntax": syntax, "definition": definition}


def prompt(engine: Any, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


@pytest.mark.usefixtures("shown")
@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_the_input_as_text(client: openai.OpenAI, engine: Any, stream: bool) -> None:
    engine.answer = lambda _: "Let me see.\n" + CALL
    answer: Any = client.responses.create(model="llama", input="hi", tools=[RUN, NOW], stream=stream)
    if stream:
        events = list(answer)
        kinds = [event.type for event in events]
        deltas = [event for event in events if event.type == "response.custom_tool_call_input.delta"]
        done = next(event for event in events if event.type == "response.custom_tool_call_input.done")
        assert len(deltas) > 1 and "".join(event.delta for event in deltas) == done.input == CODE
        added = next(e for e in events if e.type == "response.output_item.added" and e.item.type == "custom_tool_call")
        assert (added.item.name, added.item.input, added.item.id) == ("run", "", done.item_id)
        assert kinds.index("response.custom_tool_call_input.done") < len(kinds) - 2
        assert not [kind for kind in kinds if "function_call" in kind]
        answer = events[-1].response
    text, call = answer.output
    assert text.content[0].text == "Let me see."
    assert (call.type, call.name, call.input, call.status) == ("custom_tool_call", "run", CODE, "completed")
    assert answer.tools[0].type == "custom" and answer.tools[0].name == "run"


@pytest.mark.usefixtures("shown")
def test_calls_and_their_outputs_go_back(client: openai.OpenAI, engine: Any, tokenizer: Tokenizer) -> None:
    engine.answer = lambda _: CALL
    first = client.responses.create(model="llama", input="hi", tools=[RUN])
    call: Any = first.output[0]
    output: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    engine.answer = lambda _: "Good."
    ways: list[dict[str, Any]] = [
        {"input": [*ASK, *first.output, output]},
        {"input": [output], "previous_response_id": first.id},
    ]
    for way in ways:
        assert client.responses.create(model="llama", tools=[RUN], **way).output_text == "Good."
        written = prompt(engine, tokenizer)
        assert f'"arguments": {json.dumps({"input": CODE}, ensure_ascii=False)}' in written
        assert "<tool_response>done</tool_response>" in written
    [_, listed_call, listed] = client.responses.input_items.list(
        client.responses.create(model="llama", tools=[RUN], **ways[0]).id, order="asc"
    ).data
    assert (listed_call.type, listed.type) == ("custom_tool_call", "custom_tool_call_output")


@pytest.mark.usefixtures("shown")
@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_has_the_input_as_text(client: openai.OpenAI, engine: Any, tokenizer: Tokenizer, stream: bool) -> None:
    engine.answer = lambda _: CALL
    answer: Any = client.chat.completions.create(model="llama", messages=ASK, tools=[CHAT_RUN], stream=stream)
    if stream:
        choices = [chunk.choices[0] for chunk in answer]
        pieces = [call for choice in choices for call in choice.delta.tool_calls or ()]
        assert (pieces[0].type, pieces[0].custom) == ("custom", {"name": "run", "input": ""})
        assert "".join(piece.custom["input"] for piece in pieces) == CODE
        assert choices[-1].finish_reason == "tool_calls"
        return
    [call] = answer.choices[0].message.tool_calls
    assert (call.type, call.custom.name, call.custom.input) == ("custom", "run", CODE)
    history: Any = [*ASK, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    client.chat.completions.create(model="llama", messages=history, tools=[CHAT_RUN])
    assert f'"arguments": {json.dumps({"input": CODE}, ensure_ascii=False)}' in prompt(engine, tokenizer)


@pytest.mark.usefixtures("shown")
def test_choices_name_custom_tools(client: openai.OpenAI, engine: Any) -> None:
    engine.answer = lambda _: json.dumps({"input": CODE})
    named: Any = {"type": "custom", "name": "run"}
    call: Any = client.responses.create(model="llama", input="hi", tools=[RUN, NOW], tool_choice=named).output[0]
    assert (call.type, call.input) == ("custom_tool_call", CODE)
    chat_named: Any = {"type": "custom", "custom": {"name": "run"}}
    chat: Any = client.chat.completions.create(model="llama", messages=ASK, tools=[CHAT_RUN], tool_choice=chat_named)
    assert chat.choices[0].message.tool_calls[0].custom.input == CODE
    allowed: Any = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    engine.answer = lambda _: json.dumps([{"name": "run", "parameters": {"input": CODE}}])
    call = client.responses.create(model="llama", input="hi", tools=[RUN, NOW], tool_choice=allowed).output[0]
    assert (call.type, call.input) == ("custom_tool_call", CODE)
    assert "now" not in engine.requests[-1].params.structured_outputs.source
    for wrong in ({"type": "function", "name": "run"}, {"type": "custom", "name": "now"}):
        with pytest.raises(openai.BadRequestError, match="not one of the"):
            client.responses.create(model="llama", input="hi", tools=[RUN, NOW], tool_choice=wrong)  # type: ignore[call-overload]


@pytest.mark.usefixtures("shown")
@pytest.mark.parametrize(
    ("tool", "param"),
    [
        (CHAT_RUN["custom"] | {"format": {"type": "json"}}, "tools.0.custom.format"),
        (CHAT_RUN["custom"] | {"format": {"type": "grammar", "grammar": {"definition": "a"}}}, None),
        (
            CHAT_RUN["custom"] | {"format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a)|(b"}}},
            "tools.0.custom.format.grammar.definition",
        ),
        (
            CHAT_RUN["custom"]
            | {"format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: A"}}},
            "tools.0.custom.format.grammar.syntax",
        ),
        (CHAT_RUN["custom"] | {"parameters": {}}, "tools.0.custom.parameters"),
        ({"name": ""}, "tools.0.custom.name"),
    ],
)
async def test_what_cannot_be_honored_is_refused(
    http: httpx.AsyncClient, tool: dict[str, Any], param: str | None
) -> None:
    body = {"model": "llama", "messages": ASK, "tools": [{"type": "custom", "custom": tool}]}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert param is None or answer.json()["error"]["param"] == param, answer.text


async def test_a_grammar_in_lark_is_refused_by_its_name(http: httpx.AsyncClient) -> None:
    tools = [RUN | {"format": grammar("lark", "start: A")}]
    answer = await http.post("/v1/responses", json={"model": "llama", "input": "hi", "tools": tools})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "tools.0.format.syntax")
    assert "'lark'" in error["message"] and "'regex'" in error["message"] and "free text" in error["message"]


@pytest.mark.usefixtures("shown")
@pytest.mark.parametrize("given", [["a" * 1_048_571], ["a" * 524_288] * 3])
async def test_expressions_have_one_bound_before_any_is_written(http: httpx.AsyncClient, given: list[str]) -> None:
    tools = [CHAT_RUN["custom"] | {"name": f"run{i}"} for i in range(len(given))]
    for tool, expression in zip(tools, given, strict=True):
        tool["format"] = {"type": "grammar", "grammar": {"syntax": "regex", "definition": expression}}
    body = {"model": "llama", "messages": ASK, "tools": [{"type": "custom", "custom": tool} for tool in tools]}
    answer = await http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools"), answer.text
    assert "1048576" in answer.json()["error"]["message"]


# -- with a real engine, whose model writes at random ------------------------------------------------------------------


@pytest.fixture
def real_client(real: Any) -> Iterator[openai.OpenAI]:
    texts, before = real.front.texts, real.front.texts.chat_template
    texts.chat_template = "{{ tools | length }}{{ messages[0].content }}"
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client
    texts.chat_template = before


@pytest.mark.xdist_group("real_server")
@pytest.mark.parametrize("choice", ["required", {"type": "custom", "name": "run"}])
def test_a_grammar_forces_the_input(real_client: openai.OpenAI, choice: Any) -> None:
    pattern = "[0-9]{2}: (yes|no)"
    answer: Any = real_client.responses.create(
        model="sql",
        input="hi",
        tools=[RUN | {"format": grammar("regex", pattern)}],
        tool_choice=choice,
        parallel_tool_calls=False,
        max_output_tokens=48,
        temperature=1.5,
    )
    [call] = answer.output
    assert call.type == "custom_tool_call" and re.fullmatch(pattern, call.input), answer


# -- inputs, letter by letter ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 2, 3, 1000])
@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (arguments_of(CODE), CODE),
        (json.dumps({"input": CODE}), CODE),
        ('{ "input" :\n"a\\/b\\u00e9"}', "a/bé"),
        ('{"input": "\\ud83c\\udf89 \\ud83c"}', "🎉 ?"),
        ('{"input": "\\ud83cx"}', "?x"),
        ('{"input": ""}', ""),
        ('{"input": "cut off', "cut off"),
        ('{"input": "cut\\u00', "cut"),
        ('{"inp', '{"inp'),
        ('{"code": "x"}', '{"code": "x"}'),
        ('{"input": {"x": 1}}', '{"input": {"x": 1}}'),
        ("{}", "{}"),
    ],
)
def test_an_input_is_read_whatever_its_pieces(written: str, expected: str, step: int) -> None:
    reader = InputReader()
    pieces = [reader.push(written[begin : begin + step]) for begin in range(0, len(written), step)]
    assert "".join([*pieces, reader.finish()]) == expected
