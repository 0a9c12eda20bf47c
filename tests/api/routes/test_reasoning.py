"""Reasoning of models over HTTP, as openai-python reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import openai
import pytest

from lorafleet.api.app_state import AppState, make_state
from lorafleet.api.text.tokenizer import Tokenizer

HI: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {"type": "function", "function": {"name": "f"}}
HARMONY = """\
{%- for m in messages %}<|start|>{{ m.role }}
{%- if m.tool_calls and m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}
{{- '' if m.role != 'assistant' else '<|channel|>final' }}<|message|>{{ m.content }}<|end|>{% endfor %}
{%- if tools %}{{ tools | length }} tools{% endif %}<|start|>assistant"""
THINK = """\
{%- for m in messages %}{{ m.role }}: {% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{- m.content }}
{% endfor %}{% if enable_thinking is defined %}<think>
{% if not enable_thinking %}
</think>

{% endif %}{% endif %}{# tools #}"""
ANSWER = (
    "<|channel|>analysis<|message|>Say hi.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
    '<|constrain|>json<|message|>{"a": 1}'
)


@pytest.fixture
def serve(
    holder: Any, front: AppState, base_url: str, tokenizer: Tokenizer, engine: Any
) -> Iterator[Callable[..., openai.OpenAI]]:
    """Serves a template, and a model that gives one answer."""
    engine.hello = msgspec.structs.replace(engine.hello, max_model_len=4096, kv_cache_tokens=8192)
    made: list[AppState] = []

    def start(template: str, answer: str, **config: Any) -> None:
        front_config = replace(front.config, chat_template=template, **config)
        made.append(make_state(front_config, tokenizer, engine, front.models.catalog))
        holder.front, engine.answer = made[-1], lambda _: answer

    assert base_url
    yield start
    for state in made:
        state.close()


def ask(client: openai.OpenAI, *, stream: bool, **fields: Any) -> tuple[str, str, str, str | None]:
    """Reasoning, content, arguments of calls, finish reason."""
    answer: Any = client.chat.completions.create(model="llama", messages=HI, stream=stream, **fields)
    if not stream:
        [choice] = answer.choices
        calls = choice.message.tool_calls or []
        reasoning = getattr(choice.message, "reasoning_content", "")
        assert getattr(choice.message, "reasoning", "") == reasoning
        arguments = "".join(call.function.name + call.function.arguments for call in calls)
        return reasoning, choice.message.content or "", arguments, choice.finish_reason
    choices = [chunk.choices[0] for chunk in answer]
    reasoning = "".join(getattr(choice.delta, "reasoning_content", None) or "" for choice in choices)
    content = "".join(choice.delta.content or "" for choice in choices)
    functions = [call.function for choice in choices for call in choice.delta.tool_calls or []]
    arguments = "".join((function.name or "") + (function.arguments or "") for function in functions)
    return reasoning, content, arguments, choices[-1].finish_reason


@pytest.mark.parametrize("stream", [False, True])
def test_harmonys_channels_become_reasoning_content_and_calls(client: openai.OpenAI, serve: Any, stream: bool) -> None:
    serve(HARMONY, ANSWER)
    assert ask(client, stream=stream, tools=[TOOL]) == ("Say hi.", "", 'f{"a": 1}', "tool_calls")
    serve(HARMONY, ANSWER.partition("<|start|>")[0] + "<|start|>assistant<|channel|>final<|message|>Hi! <b>")
    assert ask(client, stream=stream) == ("Say hi.", "Hi! <b>", "", "stop")
    assert ask(client, stream=stream, max_tokens=30) == ("S", "", "", "length")
    serve(HARMONY, "no channels")
    assert ask(client, stream=stream) == ("", "no channels", "", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_text_between_think_tags_becomes_reasoning(client: openai.OpenAI, serve: Any, stream: bool) -> None:
    serve(THINK, "<think>\nSay hi.\n</think>\n\nHi!")
    assert ask(client, stream=stream) == ("Say hi.", "Hi!", "", "stop")
    serve(THINK, "Say hi.\n</think>\n\nHi!")
    opened = {"chat_template_kwargs": {"enable_thinking": True}}
    closed = {"chat_template_kwargs": {"enable_thinking": False}}
    assert ask(client, stream=stream, extra_body=opened) == ("Say hi.", "Hi!", "", "stop")
    serve(THINK, "Hi!")
    assert ask(client, stream=stream, extra_body=closed) == ("", "Hi!", "", "stop")
    serve(THINK, "<think>Say</think>hi", reasoning_parser="none")
    assert ask(client, stream=stream) == ("", "<think>Say</think>hi", "", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_a_format_applies_after_the_reasoning(client: openai.OpenAI, serve: Any, engine: Any, stream: bool) -> None:
    formatted: Any = {"response_format": {"type": "json_object"}}
    serve(THINK, 'Say hi.\n</think>\n\n{"a": 1}')
    opened = {**formatted, "extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    assert ask(client, stream=stream, **opened) == ("Say hi.", '{"a": 1}', "", "stop")
    assert engine.requests[-1].params.structured_outputs.kind == "tagged"
    serve(THINK, '{"a": 1}')
    closed = {**formatted, "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    assert ask(client, stream=stream, **closed) == ("", '{"a": 1}', "", "stop")
    assert engine.requests[-1].params.structured_outputs.kind == "json_object"
    regex = {"structured_outputs": {"regex": "a+"}}
    serve(THINK, "aa")
    assert ask(client, stream=stream, extra_body=regex) == ("", "aa", "", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_a_demanded_call_comes_after_the_reasoning(client: openai.OpenAI, serve: Any, stream: bool) -> None:
    serve(THINK, 'Hm [{"name"</think>\n[{"name": "f", "parameters": {}}]')
    body = {"chat_template_kwargs": {"enable_thinking": True}}
    asked = ask(client, stream=stream, tools=[TOOL], tool_choice="required", extra_body=body)
    assert asked == ('Hm [{"name"', "", "f{}", "tool_calls")


# The format of tags, the template's text that shows it, an answer.
TAGGED = [
    ("think", "<think></think>", "<think>Say hi.</think>Hi <think>"),
    ("think_response", "<think></think><response></response>", "<think>Say hi.</think>\n<response>Hi <think></response>"),  # noqa: E501
    ("think_answer", "<think></think><answer>", "<think>\nSay hi.\n</think>\n<answer>\nHi <think></answer>"),
    ("gemma4", "<|channel><channel|>", "<|channel>thought\nSay hi.<channel|>Hi <think>"),
    ("mistral", "[THINK][/THINK]", "[THINK]Say hi.[/THINK]Hi <think>"),
    ("granite", "Here is my thought process: Here is my response:",
     "Here is my thought process: Say hi. Here is my response: Hi <think>"),
    ("seed_oss", "<seed:think></seed:think>", "<seed:think>Say hi.</seed:think>Hi <think>"),
    ("command_a", "<|START_THINKING|><|END_THINKING|>",
     "<|START_THINKING|>Say hi.<|END_THINKING|><|START_RESPONSE|>Hi <think><|END_RESPONSE|>"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("name", "signs", "answer"), TAGGED)
def test_tags_are_recognized_from_the_template_or_named(
    client: openai.OpenAI, serve: Any, name: str, signs: str, answer: str, stream: bool
) -> None:
    serve("{{ messages[0].content }}{# " + signs + " #}", answer)
    assert ask(client, stream=stream) == ("Say hi.", "Hi <think>", "", "stop")
    serve("{{ messages[0].content }}", answer, reasoning_parser=name)
    assert ask(client, stream=stream) == ("Say hi.", "Hi <think>", "", "stop")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("summary", [None, "auto"])
def test_responses_have_reasoning_as_an_item(
    client: openai.OpenAI, serve: Any, tokenizer: Tokenizer, engine: Any, stream: bool, summary: Any
) -> None:
    serve(THINK, "<think>Say hi.</think>Hi!")
    fields: Any = {} if summary is None else {"reasoning": {"summary": summary}}
    answer: Any = client.responses.create(model="llama", input="hi", stream=stream, **fields)
    events = list(answer) if stream else []
    response = events[-1].response if stream else answer
    assert response.output_text == "Hi!"
    reasoning, message = response.output
    assert (reasoning.type, message.type, reasoning.status) == ("reasoning", "message", "completed")
    [part] = reasoning.content if summary is None else reasoning.summary
    assert part.text == "Say hi."
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    if stream:
        kind = "response.reasoning_text" if summary is None else "response.reasoning_summary_text"
        assert "".join(event.delta for event in events if event.type == kind + ".delta") == "Say hi."
        assert [event.text for event in events if event.type == kind + ".done"] == ["Say hi."]
        assert [event.sequence_number for event in events] == list(range(len(events)))
    again: Any = [{"role": "user", "content": "hi"}, *[item.model_dump(exclude_none=True) for item in response.output]]
    client.responses.create(model="llama", input=[*again, {"role": "user", "content": "and?"}])
    assert "<think>Say hi.</think>Hi!" in tokenizer.decode(engine.requests[-1].prompt_token_ids)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("summary", [None, "auto"])
def test_reasoning_can_be_returned_packed_by_clients_that_store_nothing(
    client: openai.OpenAI, serve: Any, tokenizer: Tokenizer, engine: Any, stream: bool, summary: Any
) -> None:
    """Codex asks for it, and returns items of reasoning without their content."""
    serve(THINK, "<think>Sáy hi.</think>Hi!")
    fields: Any = {"store": False, "include": ["reasoning.encrypted_content"], "reasoning": {"summary": summary}}
    answer: Any = client.responses.create(model="llama", input="hi", stream=stream, **fields)
    events = list(answer) if stream else []
    response = events[-1].response if stream else answer
    reasoning, message = response.output
    assert "Sáy hi." not in reasoning.encrypted_content
    if stream:
        [done] = [event.item for event in events if event.type == "response.output_item.done"][:1]
        assert done.encrypted_content == reasoning.encrypted_content
    item = {"type": "reasoning", "summary": [], "encrypted_content": reasoning.encrypted_content}
    again: Any = [{"role": "user", "content": "hi"}, item, message.model_dump(exclude_none=True)]
    client.responses.create(model="llama", input=[*again, {"role": "user", "content": "and?"}])
    assert "<think>Sáy hi.</think>Hi!" in tokenizer.decode(engine.requests[-1].prompt_token_ids)
    for foreign in ("gAAAAABo", reasoning.encrypted_content + "=", 3):
        with pytest.raises(openai.BadRequestError, match="not written by this server") as error:
            client.responses.create(model="llama", input=[item | {"encrypted_content": foreign}])  # type: ignore[list-item]
        assert error.value.param == "input.0.encrypted_content"


GRADED = "{{ messages[0].content }}{{ reasoning_effort }}"


def test_effort_goes_to_templates_that_read_it(
    client: openai.OpenAI, serve: Any, tokenizer: Tokenizer, engine: Any
) -> None:
    def prompt(template: str, **fields: Any) -> str:
        serve(template, "ok")
        client.chat.completions.create(model="llama", messages=HI, **fields)
        return tokenizer.decode(engine.requests[-1].prompt_token_ids)

    assert prompt(GRADED, reasoning_effort="high") == "hihigh"
    client.responses.create(model="llama", input="hi", reasoning={"effort": "low"})
    assert tokenizer.decode(engine.requests[-1].prompt_token_ids) == "hilow"
    assert prompt(THINK, reasoning_effort="none").rstrip().endswith("</think>")
    assert prompt(THINK, reasoning_effort="medium") == prompt(THINK)
    plain = "{{ messages[0].content }}"
    assert prompt(plain, reasoning_effort="none") == "hi"
    assert prompt(plain, extra_body={"chat_template_kwargs": {"enable_thinking": False}}) == "hi"
    for fields, param in (
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}, "chat_template_kwargs"),
        ({"extra_body": {"chat_template_kwargs": {"unknown": 1}}}, "chat_template_kwargs"),
        ({"extra_body": {"thinking_token_budget": 4}}, "thinking_token_budget"),
        ({"extra_body": {"thinking_token_budget": -1}}, "thinking_token_budget"),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            prompt(plain, **fields)
        assert error.value.param == param
    with pytest.raises(openai.BadRequestError, match="reasoning_effort"):
        prompt(THINK, reasoning_effort="high")
    with pytest.raises(openai.BadRequestError, match="several tokens"):
        prompt(THINK, extra_body={"thinking_token_budget": 4})


async def test_reasoning_of_earlier_answers_goes_to_the_template(
    http: httpx.AsyncClient, serve: Any, engine: Any, tokenizer: Tokenizer
) -> None:
    async def post(template: str, **message: object) -> httpx.Response:
        serve(template, "ok")
        talk = [*HI, {"role": "assistant", "content": "yes", **message}, *HI]
        return await http.post("/v1/chat/completions", json={"model": "llama", "messages": talk})

    called = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
    for name in ("reasoning_content", "reasoning"):
        await post(THINK, **{name: "why"})
        assert "<think>why</think>yes" in tokenizer.decode(engine.requests[-1].prompt_token_ids)
        await post(HARMONY, tool_calls=called, **{name: "why"})
        assert "analysis<|message|>why<|end|>" in tokenizer.decode(engine.requests[-1].prompt_token_ids)
    assert (await post(THINK, reasoning="a", reasoning_content="a")).status_code == 200
    error = (await post(THINK, reasoning="a", reasoning_content="b")).json()["error"]
    assert (error["param"], error["message"]) == (
        "messages.1.reasoning_content",
        "`messages.1` has two texts of reasoning; remove one.",
    )
