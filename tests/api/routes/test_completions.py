from __future__ import annotations

from typing import Any

import httpx
import msgspec
import openai
import pytest

from lorafleet.api.text.tokenizer import Tokenizer
from lorafleet.protocol.random_numbers import child_seed

BASE_ANSWER = "base wörld 🎉"


def test_base_and_adapters_answer_under_their_names(client: openai.OpenAI) -> None:
    for name, answered in (("llama", "base"), ("llama-alias", "base"), ("sql", "sql"), ("org/json", "org/json")):
        completion = client.completions.create(model=name, prompt="hello", max_tokens=100)
        assert completion.choices[0].text == f"{answered} wörld 🎉"
        assert (completion.model, completion.object, completion.choices[0].finish_reason) == (
            name,
            "text_completion",
            "stop",
        )


def test_colon_form_and_resolved_names_reach_the_adapter(client: openai.OpenAI) -> None:
    for name, answered in (("llama:sql", "sql"), ("llama-alias:org/json", "org/json"), ("found", "found")):
        completion = client.completions.create(model=name, prompt="hello", max_tokens=100)
        assert (completion.model, completion.choices[0].text) == (name, f"{answered} wörld 🎉")


def test_usage_counts_prompt_answer_and_cache(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    usage = client.completions.create(model="llama", prompt="hello world", max_tokens=3).usage
    assert usage is not None
    assert usage.prompt_tokens == len(tokenizer.encode("hello world"))
    assert (usage.completion_tokens, usage.total_tokens) == (3, usage.prompt_tokens + 3)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 1


def test_max_tokens_defaults_to_16_and_to_what_is_left(client: openai.OpenAI, engine: Any) -> None:
    engine.answer = lambda _: "x " * 100
    for prompt, num in (("a", 16), ([1] * 250, 6)):
        usage = client.completions.create(model="llama", prompt=prompt).usage
        assert usage is not None
        assert usage.completion_tokens == num


def test_every_kind_of_prompt_is_taken(client: openai.OpenAI, engine: Any, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello")
    kinds: list[tuple[Any, int]] = [("hello", 1), (["hello", "a"], 2), (ids, 1), ([ids, ids, [7]], 3)]
    for prompt, num in kinds:
        choices = client.completions.create(model="llama", prompt=prompt).choices
        assert [c.index for c in choices] == list(range(num))
    assert engine.requests[0].prompt_token_ids == ids
    assert engine.requests[3].prompt_token_ids == ids


@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_numbered_prompt_major_and_have_their_own_seeds(
    client: openai.OpenAI, engine: Any, stream: bool
) -> None:
    engine.answer = lambda r: f"{len(r.prompt_token_ids)}/{r.params.seed}"
    answer: Any = client.completions.create(
        model="sql", prompt=[[1], [1, 2]], n=2, seed=5, max_tokens=50, stream=stream
    )
    texts = dict.fromkeys(range(4), "")
    for chunk in answer if stream else [answer]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    second = child_seed(5, 1)
    assert list(texts.values()) == ["1/5", f"1/{second}", "2/5", f"2/{second}"]


def test_stream_joins_to_the_whole_answer_and_ends_with_usage(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="sql", prompt="hello", max_tokens=100, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks[:-1]) == "sql wörld 🎉"
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 1
    assert len({c.id for c in chunks}) == 1


async def test_stream_is_server_sent_events_with_done(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", json={"model": "llama", "prompt": "a", "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: {") for event in events[:-2])
    assert "usage" not in events[0]


async def test_stream_chunks_hold_no_line_separators_of_any_client(http: httpx.AsyncClient, engine: Any) -> None:
    text = "a\x85b\u2028c\u2029d\x00e\x1cf\ng"
    engine.answer = lambda _: text
    body = {"model": "llama", "prompt": "a", "stream": True, "max_tokens": 100}
    response = await http.post("/v1/completions", json=body)
    lines = [line for line in response.text.splitlines() if line and line != "data: [DONE]"]
    chunks = [msgspec.json.decode(line.removeprefix("data: ")) for line in lines]
    assert "".join(c["choices"][0]["text"] for c in chunks) == text


def test_continuous_usage_grows_with_every_chunk(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.completions.create(model="llama", prompt="a", max_tokens=5, stream=True, stream_options=options)
    )
    counts = [c.usage.completion_tokens for c in chunks if c.usage]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts)
    assert counts[-1] == 5


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_ends_the_text_and_aborts_the_sequence(client: openai.OpenAI, engine: Any, stream: bool) -> None:
    engine.hold_after = 12
    engine.answer = lambda _: "one two END three four five six"
    for include, want in ((False, "one two "), (True, "one two END")):
        answer: Any = client.completions.create(
            model="llama",
            prompt="a",
            max_tokens=50,
            stop=["zzz", "END"],
            stream=stream,
            extra_body={"include_stop_str_in_output": include},
        )
        chunks = list(answer) if stream else [answer]
        assert "".join(c.choices[0].text for c in chunks) == want
        last = chunks[-1].choices[0]
        assert (last.finish_reason, last.stop_reason) == ("stop", "END")
        assert not engine.running


def test_logprobs_of_the_answer(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    choice = client.completions.create(model="llama", prompt="a", max_tokens=100, logprobs=3).choices[0]
    logprobs = choice.logprobs
    assert logprobs is not None
    tokens = [*tokenizer.encode(BASE_ANSWER), tokenizer.eos_token_id]
    assert logprobs.tokens == [tokenizer.token_text(t or 0) for t in tokens]
    assert logprobs.token_logprobs == [-0.5] * len(tokens)
    assert logprobs.top_logprobs is not None
    best = logprobs.top_logprobs[0]
    assert len(best) == 3
    assert min(best.values()) == -9999.0
    assert logprobs.text_offset is not None
    assert logprobs.text_offset[:2] == [0, len(tokenizer.token_text(tokens[0] or 0))]
    assert logprobs.text_offset[-1] == len(choice.text)


def test_logprobs_0_gives_the_token_itself(client: openai.OpenAI) -> None:
    logprobs = client.completions.create(model="llama", prompt="a", max_tokens=1, logprobs=0).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.top_logprobs == [{logprobs.tokens[0]: -0.5}]


def test_streamed_logprobs_join_to_the_whole_ones(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="llama", prompt="a", max_tokens=100, logprobs=1, echo=True, stop="ld")
    streamed: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    text = ""
    for chunk in client.completions.create(
        model="llama", prompt="a", max_tokens=100, logprobs=1, echo=True, stop="ld", stream=True
    ):
        text += chunk.choices[0].text
        for name, values in streamed.items():
            values.extend(getattr(chunk.choices[0].logprobs, name))
    assert whole.choices[0].logprobs is not None
    assert streamed == {name: getattr(whole.choices[0].logprobs, name) for name in streamed}
    assert text == whole.choices[0].text


def test_echo_puts_the_prompt_and_its_logprobs_first(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    choice = client.completions.create(model="llama", prompt="héllo", max_tokens=2, echo=True, logprobs=1).choices[0]
    answer = client.completions.create(model="llama", prompt="héllo", max_tokens=2).choices[0].text
    assert choice.text == "héllo" + answer
    logprobs = choice.logprobs
    assert logprobs is not None
    prompt = tokenizer.encode("héllo")
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert len(logprobs.tokens) == len(prompt) + 2
    assert logprobs.token_logprobs == [None] + [-0.5] * (len(prompt) + 1)
    assert logprobs.text_offset[len(prompt)] == len("héllo")


def test_echo_of_token_ids_is_their_text(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    choice = client.completions.create(
        model="llama", prompt=tokenizer.encode("hello"), max_tokens=1, echo=True
    ).choices[0]
    assert choice.text.startswith("hello")


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_max_tokens_0_scores_the_prompt_only(
    client: openai.OpenAI, tokenizer: Tokenizer, stream: bool
) -> None:
    answer: Any = client.completions.create(
        model="llama", prompt="hello", max_tokens=0, echo=True, logprobs=2, stream=stream
    )
    choice = (list(answer) if stream else [answer])[0].choices[0]
    assert (choice.text, choice.finish_reason) == ("hello", "length")
    assert len(choice.logprobs.tokens) == len(tokenizer.encode("hello"))
    if not stream:
        assert answer.usage.completion_tokens == 0


def test_vllm_extras_reach_the_answer(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    extra = {
        "prompt_logprobs": 1,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "request_id": "mine",
    }
    answer: Any = client.completions.create(model="llama", prompt="hello a", max_tokens=2, logprobs=1, extra_body=extra)
    choice, prompt = answer.choices[0], tokenizer.encode("hello a")
    assert answer.id == "cmpl-mine"
    assert choice.prompt_token_ids == prompt
    assert choice.token_ids == tokenizer.encode(BASE_ANSWER)[:2]
    assert choice.logprobs.tokens == [f"token_id:{i}" for i in choice.token_ids]
    assert choice.prompt_logprobs[0] is None
    entry = choice.prompt_logprobs[1]
    assert entry[str(prompt[1])] == {"logprob": -0.5, "rank": 2, "decoded_token": tokenizer.token_text(prompt[1])}
    assert entry["40"]["rank"] == 1


def test_streamed_token_ids_join_to_the_whole_ones(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    chunks: Any = list(
        client.completions.create(
            model="llama", prompt="hello", max_tokens=100, stream=True, extra_body={"return_token_ids": True}
        )
    )
    ids = [i for c in chunks for i in c.choices[0].token_ids]
    assert ids == [*tokenizer.encode(BASE_ANSWER), tokenizer.eos_token_id]
    assert chunks[0].choices[0].prompt_token_ids == tokenizer.encode("hello")


def test_truncate_prompt_tokens_keeps_the_end(client: openai.OpenAI, engine: Any) -> None:
    for keep, want in ((2, [8, 9]), (-1, [7, 8, 9])):
        client.completions.create(model="llama", prompt=[7, 8, 9], extra_body={"truncate_prompt_tokens": keep})
        assert engine.requests[-1].prompt_token_ids == want
    client.completions.create(model="llama", prompt=[1] * 999, max_tokens=5, extra_body={"truncate_prompt_tokens": -1})
    assert len(engine.requests[-1].prompt_token_ids) == 251


def test_sampling_fields_reach_the_engine(client: openai.OpenAI, engine: Any) -> None:
    plain: Any = {
        "temperature": 0.5,
        "top_p": 0.9,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "seed": 3,
        "max_tokens": 9,
    }
    extra = {
        "top_k": 4,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "stop_token_ids": [5],
        "ignore_eos": True,
        "min_tokens": 2,
        "skip_special_tokens": False,
    }
    client.completions.create(model="llama", prompt="a", logit_bias={"7": -1}, **plain, extra_body=extra)
    params = engine.requests[-1].params
    assert {name: getattr(params, name) for name in plain | extra} == plain | extra
    assert params.logit_bias == {7: -1.0}


async def test_an_adapter_that_fell_back_to_the_base_says_so(
    http: httpx.AsyncClient, client: openai.OpenAI, engine: Any
) -> None:
    engine.fallback_reason = "rank too large"
    body: dict[str, Any] = {"model": "sql", "prompt": "a"}
    whole = await http.post("/v1/completions", json=body)
    said = {"requested": "sql", "reason": "rank too large"}
    assert whole.headers["x-lorafleet-fallback"] == "base"
    assert (whole.json()["model"], whole.json()["lora_fallback"]) == ("llama", said)
    stream = await http.post("/v1/completions", json=body | {"stream": True})
    assert stream.headers["x-lorafleet-fallback"] == "base"
    first: Any = next(iter(client.completions.create(model="sql", prompt="a", stream=True)))
    assert (first.model, first.lora_fallback) == ("llama", said)


async def test_openai_async_client_streams(async_client: openai.AsyncOpenAI) -> None:
    stream = await async_client.completions.create(model="sql", prompt="a", max_tokens=100, stream=True)
    assert "".join([c.choices[0].text async for c in stream]) == "sql wörld 🎉"
