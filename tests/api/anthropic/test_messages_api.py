"""/v1/messages as anthropic's own client sends and reads it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import anthropic
import httpx
import jsonschema
import msgspec
import pytest

import tool_templates
from lorafleet.api.access.access import Access
from lorafleet.api.access.caller import Caller
from lorafleet.api.access.gate import Gate, KnownKey
from lorafleet.api.app_state import AppState, make_state
from lorafleet.api.routes.build_api import ROUTES
from lorafleet.api.routes.openapi import openapi
from lorafleet.api.text.tokenizer import Tokenizer

UNTYPED = {"temperature", "top_k", "top_p"}  # Fields that the client no longer has, but that others send.
DOCUMENT = openapi(ROUTES)
HI: Any = {"role": "user", "content": "hi"}
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather at a place.",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}
NOW: Any = {"name": "now", "input_schema": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"place": "Oslo"}}\n</tool_call>'
# Shows tools in Hermes's format and reasoning between tags, and has a switch for it and an effort.
THINKING = tool_templates.HERMES.replace(
    "<|im_start|>assistant\n{% endif",
    "<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% if reasoning_effort is defined %}effort {{ reasoning_effort }}{% endif %}{# <think> </think> #}{% endif",
)


@pytest.fixture
def claude(base_url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=base_url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture
def serve(
    holder: Any, front: AppState, base_url: str, tokenizer: Tokenizer, engine: Any
) -> Iterator[Callable[..., None]]:
    """Serves a template, and a model that gives one answer."""
    engine.hello = msgspec.structs.replace(engine.hello, max_model_len=4096, kv_cache_tokens=8192)
    made: list[AppState] = []

    def start(template: str, answer: str, access: Access | None = None) -> None:
        made.append(
            make_state(replace(front.config, chat_template=template), tokenizer, engine, front.models.catalog, access)
        )
        holder.front, engine.answer = made[-1], lambda _: answer

    assert base_url
    yield start
    for state in made:
        state.close()


def prompt(engine: Any, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


def ask(claude: anthropic.Anthropic, *, stream: bool, **fields: Any) -> anthropic.types.Message:
    asked: Any = {"model": "llama", "max_tokens": 100, "messages": [HI]} | fields
    asked["extra_body"] = {name: asked.pop(name) for name in UNTYPED & asked.keys()}
    if not stream:
        return claude.messages.create(**asked)
    with claude.messages.stream(**asked) as events:
        return events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_is_answered(claude: anthropic.Anthropic, engine: Any, tokenizer: Tokenizer, stream: bool) -> None:
    system: Any = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1f3a"},
        {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ]
    message = ask(claude, stream=stream, model="sql", system=system, metadata={"user_id": "u"}, temperature=0.5)
    assert [block.text for block in message.content if block.type == "text"] == ["sql wörld 🎉"]
    assert (message.stop_reason, message.stop_sequence, message.model) == ("end_turn", None, "sql")
    assert message.role == "assistant" and message.id.startswith("msg_")
    request = engine.requests[0]
    assert prompt(engine, tokenizer).startswith(
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>"
    )
    assert (request.params.temperature, request.params.max_tokens) == (0.5, 100)
    usage = message.usage
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (1, 0)
    assert usage.input_tokens == len(request.prompt_token_ids) - 1
    assert usage.output_tokens == len(tokenizer.encode("sql wörld 🎉")) + 1


async def test_an_answer_is_as_documented(http: httpx.AsyncClient, engine: Any) -> None:
    engine.fallback_reason = "no such file"
    response = await http.post("/v1/messages", json={"model": "sql", "max_tokens": 9, "messages": [HI]})
    assert response.headers["request-id"] == response.json()["id"]
    assert (response.json()["model"], response.json()["lora_fallback"]["requested"]) == ("llama", "sql")
    jsonschema.validate(response.json(), {"$ref": "#/components/schemas/AnthropicAnswer", **DOCUMENT})


async def test_the_events_come_in_anthropics_order(http: httpx.AsyncClient, serve: Any) -> None:
    serve(THINKING, "<think>Hm.</think>\n\nLet me see." + CALL)
    body = {"model": "llama", "max_tokens": 200, "messages": [HI], "tools": [WEATHER], "stream": True}
    response = await http.post("/v1/messages?beta=true", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [part.partition("\ndata: ") for part in response.text.strip().split("\n\n")]
    read = [json.loads(data) for _, _, data in events]
    assert [name for name, _, _ in events] == [f"event: {data['type']}" for data in read]
    assert len({data["index"] for data in read if "index" in data}) == 3
    kinds = [data.get("delta", data).get("type", data["type"]) for data in read]
    order = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    assert order == [
        *("message_start", "ping"),
        *("content_block_start", "thinking_delta", "signature_delta", "content_block_stop"),
        *("content_block_start", "text_delta", "content_block_stop"),
        *("content_block_start", "input_json_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    starts = [data["content_block"] for data in read if data["type"] == "content_block_start"]
    assert [start["type"] for start in starts] == ["thinking", "text", "tool_use"]
    assert (starts[2]["name"], starts[2]["input"]) == ("get_weather", {})
    assert read[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called_and_their_results_go_back(
    claude: anthropic.Anthropic, serve: Any, engine: Any, tokenizer: Tokenizer, stream: bool
) -> None:
    serve(THINKING, "Let me see.\n" + CALL)
    first = ask(claude, stream=stream, tools=[WEATHER], tool_choice={"type": "auto"})
    text, call = first.content
    assert text.type == "text" and text.text.strip() == "Let me see."
    assert call.type == "tool_use" and (call.name, call.input) == ("get_weather", {"place": "Oslo"})
    assert first.stop_reason == "tool_use"
    serve(THINKING, "Cold.")
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "-5"}]}
    failed = {"type": "tool_result", "tool_use_id": call.id, "content": "no sensor", "is_error": True}
    turn = {"role": "user", "content": [result, failed, {"type": "text", "text": "Well?"}]}
    history: Any = [HI, {"role": "assistant", "content": first.content}, turn]
    assert ask(claude, stream=stream, tools=[WEATHER], messages=history).stop_reason == "end_turn"
    written = prompt(engine, tokenizer)
    assert f"Let me see.{CALL.replace(chr(10), '')}<|im_end|>" in written.replace("see.\n", "see.")
    assert "<tool_response>-5</tool_response>" in written
    assert "<tool_response>Error: no sensor</tool_response>" in written
    assert "user\nWell?<|im_end|>" in written


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_becomes_a_block_of_its_own_and_goes_back(
    claude: anthropic.Anthropic, serve: Any, engine: Any, tokenizer: Tokenizer, stream: bool
) -> None:
    serve(THINKING, "<think>Hm.</think>\n\nHello.")
    message = ask(claude, stream=stream, max_tokens=2000, thinking={"type": "enabled", "budget_tokens": 1024})
    thinking, text = message.content
    assert thinking.type == "thinking" and (thinking.thinking, bool(thinking.signature)) == ("Hm.", True)
    assert text.type == "text" and text.text == "Hello."
    reasoned = tool_templates.HERMES.replace("{{ m.content }}", "[{{ m.reasoning_content }}]{{ m.content }}")
    serve(reasoned, "Hello.")
    ask(claude, stream=stream, messages=[HI, {"role": "assistant", "content": message.content}, HI])
    assert "[Hm.]Hello." in prompt(engine, tokenizer)


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_that_is_disabled_or_omitted_is_not_shown(
    claude: anthropic.Anthropic, serve: Any, engine: Any, tokenizer: Tokenizer, stream: bool
) -> None:
    serve(THINKING, "<think>Hm.</think>Hello.")
    disabled = ask(claude, stream=stream, thinking={"type": "disabled"})
    assert [block.type for block in disabled.content] == ["text"]
    assert prompt(engine, tokenizer).endswith("<think></think>")
    omitted = ask(claude, stream=stream, thinking={"type": "adaptive", "display": "omitted"})
    assert [block.type for block in omitted.content] == ["thinking", "text"]
    assert omitted.content[0].thinking == ""  # type: ignore[union-attr]
    assert not prompt(engine, tokenizer).endswith("<think></think>")


def test_a_budget_bounds_the_reasoning_of_models_whose_closing_tag_is_one_token(
    claude: anthropic.Anthropic, serve: Any, engine: Any, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(THINKING, "Hello.")
    asked: Any = {"stream": False, "max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1500}}
    ask(claude, **asked)
    assert engine.requests[-1].params.structured_outputs is None
    monkeypatch.setattr(type(tokenizer), "id_of", lambda _self, name: 7 if name == "</think>" else None)
    ask(claude, **asked)
    assert "[max_tokens=1500]" in engine.requests[-1].params.structured_outputs.source


def test_an_effort_goes_to_templates_that_read_one(
    claude: anthropic.Anthropic, serve: Any, engine: Any, tokenizer: Tokenizer
) -> None:
    serve(THINKING, "Hello.")
    ask(claude, stream=False, output_config={"effort": "low"})
    assert prompt(engine, tokenizer).endswith("effort low")
    serve(tool_templates.HERMES, "Hello.")
    ask(claude, stream=False, output_config={"effort": "high"})  # Anthropic's default.
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.effort"):
        ask(claude, stream=False, output_config={"effort": "low"})


def test_a_call_can_be_demanded(claude: anthropic.Anthropic, serve: Any, engine: Any) -> None:
    serve(THINKING, '[{"name": "now", "parameters": {}}]')
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    message = ask(claude, stream=False, tools=[WEATHER, NOW], tool_choice=choice)
    assert [block.name for block in message.content] == ["now"]  # type: ignore[union-attr]
    _, [part] = json.loads(engine.requests[-1].params.structured_outputs.source)  # Reasoning may precede the call.
    assert '"maxItems":1' in json.dumps(part, separators=(",", ":"))
    serve(THINKING, '{"place": "Oslo"}')
    message = ask(claude, stream=True, tools=[WEATHER, NOW], tool_choice={"type": "tool", "name": "get_weather"})
    assert [block.input for block in message.content] == [{"place": "Oslo"}]  # type: ignore[union-attr]
    serve(THINKING, "No tools.")
    message = ask(claude, stream=False, tools=[WEATHER], tool_choice={"type": "none"})
    assert message.stop_reason == "end_turn"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_the_limit_cuts_off_is_shown(claude: anthropic.Anthropic, serve: Any, stream: bool) -> None:
    serve(THINKING, '{"place": "Oslo"}')
    asked = {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "get_weather"}, "max_tokens": 4}
    if stream:
        with claude.messages.stream(model="llama", messages=[HI], **asked) as events:  # type: ignore[arg-type]
            kinds = [event.type for event in events]
        assert kinds[-1] == "message_stop"
        return
    message = ask(claude, stream=False, **asked)
    assert message.stop_reason == "max_tokens"
    assert list(message.content[0].input) == ["INVALID_JSON"]  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True])
def test_reasons_to_stop(claude: anthropic.Anthropic, engine: Any, stream: bool) -> None:
    stopped = ask(claude, stream=stream, stop_sequences=["wör"], top_k=5, top_p=0.9)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "wör")
    assert stopped.content[0].text == "base "  # type: ignore[union-attr]
    assert (engine.requests[-1].params.top_k, engine.requests[-1].params.top_p) == (5, 0.9)
    assert ask(claude, stream=stream, max_tokens=2).stop_reason == "max_tokens"
    engine.answer = lambda _: "x " * 300
    assert ask(claude, stream=stream, max_tokens=5000).stop_reason == "model_context_window_exceeded"


def test_the_last_message_of_the_assistant_is_continued(
    claude: anthropic.Anthropic, engine: Any, tokenizer: Tokenizer
) -> None:
    ask(claude, stream=False, messages=[HI, {"role": "assistant", "content": "Well, the"}])
    assert prompt(engine, tokenizer).endswith("assistant\nWell, the")


def test_turns_of_one_role_are_joined(claude: anthropic.Anthropic, engine: Any, tokenizer: Tokenizer) -> None:
    answered = [{"role": "assistant", "content": text} for text in ("a", "b")]
    ask(claude, stream=False, messages=[HI, {"role": "user", "content": "there"}, *answered, HI])
    assert "user\nhi\nthere<|im_end|>\n<|im_start|>assistant\na\nb<|im_end|>" in prompt(engine, tokenizer)


def test_an_answer_may_have_a_format(claude: anthropic.Anthropic, engine: Any) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}}
    ask(claude, stream=False, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert json.loads(engine.requests[-1].params.structured_outputs.source) == schema


def test_tokens_are_counted_as_an_answer_would_count_them(claude: anthropic.Anthropic, serve: Any, engine: Any) -> None:
    serve(THINKING, "Hello.")
    asked: Any = {"model": "sql", "messages": [HI], "system": "Be kind.", "tools": [WEATHER]}
    counted = claude.messages.count_tokens(**asked)
    assert not engine.requests
    usage = claude.messages.create(max_tokens=9, **asked).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


async def test_what_claude_code_sends_is_served(http: httpx.AsyncClient, serve: Any) -> None:
    serve(THINKING, "Hello.")
    ephemeral = {"cache_control": {"type": "ephemeral"}}
    body = {
        "model": "llama",
        "max_tokens": 32_000,
        "system": [{"type": "text", "text": "You are a coder.", **ephemeral}],
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "<system-reminder>"}, {"type": "text", "text": "hi"}],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "of another server"},
                    {"type": "tool_use", "id": "toolu_1", "name": "now", "input": {}, "caller": {"type": "direct"}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "", **ephemeral}],
            },
        ],
        "tools": [WEATHER | {"type": "custom", "eager_input_streaming": True}, NOW | ephemeral],
        "metadata": {"user_id": "user_1_account__session_2"},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "medium"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "stream": True,
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219", "x-api-key": "x"}
    response = await http.post("/v1/messages?beta=true", json=body, headers=headers)
    assert response.status_code == 200, response.text
    assert "message_stop" in response.text


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0"),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}],
                }
            ]
        },
        "messages.0.content.0.content.0",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "noise"}]}]}, "messages.0.content.0"),
    ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x", "signature": ""}]}]}, "thinking"),
    ({"messages": [HI, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]}, "redacted"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    ({"messages": []}, "messages"),
    ({"messages": [HI, {"role": "assistant", "content": ""}]}, "messages"),
    ({"messages": [HI | {"content": "x" * 3000}]}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"system": [{"type": "text", "text": "x", "citations": [{}]}]}, "system.0.citations"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1000}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
    ({"tools": [NOW], "tool_choice": {"type": "any"}}, "tools"),  # The template shows none.
    ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits.0.type"),
    ({"container": "c"}, "container"),
    ({"speed": "fast"}, "speed"),
    ({"n": 2}, "n"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
]


@pytest.mark.parametrize(("body", "named"), REFUSED)
async def test_what_is_not_served_is_refused_by_name(http: httpx.AsyncClient, body: dict[str, Any], named: str) -> None:
    response = await http.post("/v1/messages", json={"model": "llama", "max_tokens": 9, "messages": [HI]} | body)
    assert response.status_code == 400, response.text
    error = response.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert named in error["error"]["message"]
    jsonschema.validate(error, {"$ref": "#/components/schemas/AnthropicErrorBody", **DOCUMENT})


def test_errors_are_those_of_anthropics_client(claude: anthropic.Anthropic, engine: Any) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        ask(claude, stream=False, model="nobody")
    engine.fail_after = 0
    with pytest.raises(anthropic.InternalServerError, match=r"api_error.*the engine tripped"):
        ask(claude, stream=True)
    engine.fail_after = 2
    with pytest.raises(anthropic.APIStatusError, match="the engine tripped"):
        ask(claude, stream=True)


async def test_unknown_routes_answer_in_anthropics_form(http: httpx.AsyncClient) -> None:
    for method, path, status, kind in (
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
        ("GET", "/v1/messages", 405, "invalid_request_error"),
    ):
        response = await http.request(method, path)
        assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
    assert "param" in (await http.post("/v1/messagesx")).json()["error"]


def test_the_key_is_read_where_anthropics_client_sends_it(serve: Any, base_url: str) -> None:
    known = {hashlib.sha256(b"right").hexdigest(): KnownKey(Caller("acme", "k", frozenset(("infer",))))}
    serve(THINKING, "Hello.", Access(Gate(keys=lambda: known)))
    for fields in ({"api_key": "right"}, {"auth_token": "right"}):
        with anthropic.Anthropic(base_url=base_url, max_retries=0, **fields) as client:
            assert ask(client, stream=False).stop_reason == "end_turn"
    with (
        anthropic.Anthropic(base_url=base_url, max_retries=0, api_key="wrong") as client,
        pytest.raises(anthropic.AuthenticationError, match="authentication_error"),
    ):
        ask(client, stream=False)
