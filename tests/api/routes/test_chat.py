from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from lorafleet.api.app_state import AppState, make_state
from lorafleet.api.text.tokenizer import Tokenizer

HI: Any = [{"role": "user", "content": "hi"}]
PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_an_adapter_answers_under_its_name(client: openai.OpenAI, engine: Any, tokenizer: Tokenizer) -> None:
    answer = client.chat.completions.create(model="sql", messages=HI)
    assert (answer.model, answer.object) == ("sql", "chat.completion")
    assert answer.choices[0].message.content == "sql wörld 🎉"
    assert (answer.choices[0].message.role, answer.choices[0].finish_reason) == ("assistant", "stop")
    assert tokenizer.decode(engine.requests[0].prompt_token_ids, skip_special_tokens=False) == PROMPT
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(engine.requests[0].prompt_token_ids)


@pytest.mark.parametrize("limit", [{}, {"max_tokens": 3}, {"max_completion_tokens": 3}])
def test_answers_go_to_the_contexts_end_unless_limited(
    client: openai.OpenAI, engine: Any, tokenizer: Tokenizer, limit: dict[str, int]
) -> None:
    engine.answer = lambda _: "x " * 300
    answer = client.chat.completions.create(model="llama", messages=HI, **limit)  # type: ignore[call-overload]
    left = engine.hello.max_model_len - len(tokenizer.encode(PROMPT))
    assert answer.usage.completion_tokens == (3 if limit else left)
    assert answer.choices[0].finish_reason == "length"


def test_stream_begins_with_the_role_and_joins_to_the_answer(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="sql", messages=HI, stream=True, stream_options={"include_usage": True}, n=2
    )
    chunks = list(stream)
    for index in (0, 1):
        choices = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == index]
        assert (choices[0].delta.role, choices[0].delta.content) == ("assistant", "")
        assert "".join(c.delta.content or "" for c in choices) == "sql wörld 🎉"
        assert [c.finish_reason for c in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert {c.object for c in chunks} == {"chat.completion.chunk"}
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens > 2


def test_openai_stream_helper_accumulates(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="sql", messages=HI) as stream:
        assert stream.get_final_completion().choices[0].message.content == "sql wörld 🎉"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_have_bytes_and_the_best_tokens(client: openai.OpenAI, tokenizer: Tokenizer, stream: bool) -> None:
    answer: Any = client.chat.completions.create(
        model="llama", messages=HI, logprobs=True, top_logprobs=2, stream=stream
    )
    entries = [
        e for c in (answer if stream else [answer]) if c.choices[0].logprobs for e in c.choices[0].logprobs.content
    ]
    tokens = [*tokenizer.encode("base wörld 🎉"), tokenizer.eos_token_id or 0]
    assert [e.token for e in entries] == [tokenizer.token_text(t) for t in tokens]
    assert b"".join(bytes(e.bytes) for e in entries[:-1]).decode() == "base wörld 🎉"
    assert [len(e.top_logprobs) for e in entries] == [2] * len(tokens)
    assert (entries[0].logprob, entries[0].top_logprobs[1].token) == (-0.5, entries[0].token)


def test_logprobs_without_top_logprobs_have_none(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="llama", messages=HI, logprobs=True)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert answer.choices[0].logprobs.content[0].top_logprobs == []


def test_text_parts_and_openais_own_messages_are_taken(
    client: openai.OpenAI, engine: Any, tokenizer: Tokenizer
) -> None:
    answer = client.chat.completions.create(model="llama", messages=HI)
    history: Any = [
        {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "kind"}]},
        {"role": "user", "content": "hi", "name": "bob"},
        answer.choices[0].message,
        {"role": "assistant", "content": None},
    ]
    client.chat.completions.create(model="llama", messages=history)
    prompt = tokenizer.decode(engine.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert prompt.startswith("<|im_start|>developer\nbe\nkind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n")
    assert "assistant\nbase wörld 🎉<|im_end|>" in prompt


def test_template_fields_shape_the_prompt(client: openai.OpenAI, engine: Any, tokenizer: Tokenizer) -> None:
    def prompt(messages: Any = HI, **extra: Any) -> str:
        client.chat.completions.create(model="llama", messages=messages, extra_body=extra)
        return tokenizer.decode(engine.requests[-1].prompt_token_ids, skip_special_tokens=False)

    assert prompt(chat_template_kwargs={"thinking": True}).endswith("<think>")
    assert prompt(add_generation_prompt=False).endswith("hi<|im_end|>\n")
    assert prompt([*HI, {"role": "assistant", "content": "Sure"}], continue_final_message=True).endswith("Sure")


def test_the_servers_template_replaces_the_models(
    client: openai.OpenAI, engine: Any, front: AppState, holder: Any, tokenizer: Tokenizer
) -> None:
    from dataclasses import replace

    config = replace(front.config, chat_template="{{ messages[0].content }}!")
    holder.front = make_state(config, tokenizer, engine, front.models.catalog)
    client.chat.completions.create(model="llama", messages=HI)
    assert tokenizer.decode(engine.requests[0].prompt_token_ids) == "hi!"


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ASKED = {"role": "user", "content": "a"}
MARKED = {"type": "ephemeral"}
CALLED = [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}]


@pytest.mark.parametrize(
    ("messages", "same"),
    [
        ([{"role": "user", "content": []}], [{"role": "user", "content": ""}]),
        ([ASKED | {"content": [{"type": "text", "text": "a", "cache_control": MARKED}]}], [ASKED]),
        ([ASKED | {"content": [{"type": "input_text", "text": "a"}]}], [ASKED]),
        ([ASKED | {"id": "msg_1", "cache_control": MARKED}], [ASKED]),
        (
            [ASKED, {"role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}]}, ASKED],
            [ASKED, {"role": "assistant", "content": "b"}, ASKED],
        ),
        ([ASKED, CALLED[1] | {"content": []}], CALLED),
        ([ASKED, CALLED[1] | {"content": None, "id": "m", "status": "completed"}], CALLED),
        (
            [*CALLED, {"role": "tool", "tool_call_id": "c1", "content": None}],
            [*CALLED, {"role": "tool", "tool_call_id": "c1", "content": ""}],
        ),
    ],
    ids=str,
)
def test_forms_of_messages_that_mean_the_same_make_the_same_prompt(
    client: openai.OpenAI, engine: Any, messages: Any, same: Any
) -> None:
    for given in (messages, same):
        client.chat.completions.create(model="llama", messages=given, max_tokens=1)
    first, second = engine.requests[-2:]
    assert first.prompt_token_ids == second.prompt_token_ids


def test_vllm_extras_reach_the_answer(client: openai.OpenAI, engine: Any) -> None:
    extra = {"return_token_ids": True, "prompt_logprobs": 0, "request_id": "mine"}
    answer: Any = client.chat.completions.create(model="llama", messages=HI, max_tokens=2, extra_body=extra)
    assert answer.id == "chatcmpl-mine"
    assert answer.prompt_token_ids == engine.requests[0].prompt_token_ids
    assert len(answer.prompt_logprobs) == len(answer.prompt_token_ids)
    assert len(answer.choices[0].token_ids) == 2
    chunks: Any = list(
        client.chat.completions.create(
            model="llama", messages=HI, max_tokens=2, stream=True, extra_body={"return_token_ids": True}
        )
    )
    assert chunks[0].prompt_token_ids == answer.prompt_token_ids
    assert [i for c in chunks for i in c.choices[0].token_ids] == answer.choices[0].token_ids


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_do_not_leak(client: openai.OpenAI, engine: Any, stream: bool) -> None:
    engine.answer = lambda _: "héllo wörld"
    answer: Any = client.chat.completions.create(model="llama", messages=HI, stop="o wö", stream=stream)
    if stream:
        assert "".join(c.choices[0].delta.content or "" for c in answer) == "héll"
    else:
        assert answer.choices[0].message.content == "héll"


async def test_an_adapter_that_fell_back_to_the_base_says_so(http: httpx.AsyncClient, engine: Any) -> None:
    engine.fallback_reason = "no such file"
    body: dict[str, Any] = {"model": "sql", "messages": HI}
    whole = (await http.post("/v1/chat/completions", json=body)).json()
    assert (whole["model"], whole["lora_fallback"]["reason"]) == ("llama", "no such file")
    stream = await http.post("/v1/chat/completions", json=body | {"stream": True})
    first = stream.text.split("\n\n")[0]
    assert '"model":"llama"' in first
    assert "lora_fallback" in first
    assert stream.headers["x-lorafleet-fallback"] == "base"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([{"content": "hi"}], "messages.0.role"),
        ([{"role": "villain", "content": "hi"}], "messages.0.role"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": 3}], "messages.0.content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages.0.content.0.type",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text"),
        ([*HI, {"role": "assistant", "content": "", "tool_calls": [{"id": "x"}]}], "messages.1.tool_calls.0"),
        ([{"role": "user", "content": "hi", "mood": "good"}], "messages.0.mood"),
    ],
)
async def test_a_wrong_message_is_named(http: httpx.AsyncClient, messages: Any, param: str) -> None:
    response = await http.post("/v1/chat/completions", json={"model": "llama", "messages": messages})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
