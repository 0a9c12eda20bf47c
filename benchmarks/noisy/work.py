"""Attacks with valid requests that are as expensive as possible: sequences, log-probabilities, long texts."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator

from noisy.hostile import Attack, Call, Hostile, post

MIB = 1 << 20


def random_ids(hostile: Hostile, length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(5, hostile.target.vocab_size) for _ in range(length)]


async def many_samples(hostile: Hostile) -> None:
    """Requests 128 samples of sixteen prompts, which is the most that one request may have."""
    prompts = [f"Count from {i}" for i in range(16)]
    await hostile.flood(hostile.completion(prompt=prompts, n=128, max_tokens=32, temperature=1.0), width=4)


async def many_prompts(hostile: Hostile) -> None:
    """Sends 2,048 prompts in each request, and a million."""
    most = hostile.completion(prompt=[[5 + i % 900, 7] for i in range(2048)], max_tokens=8)
    await hostile.flood(most, most, hostile.completion(prompt=[[5]] * MIB), width=3)


async def many_long_answers(hostile: Hostile) -> None:
    """Opens five hundred streams at once, each as long as the context."""
    room = hostile.target.context_len - 64
    await hostile.flood(hostile.completion(max_tokens=room, stream=True), width=500)


async def prompts_at_the_context_limit(hostile: Hostile) -> None:
    """Sends prompts that fill the context, no two alike, sixty at a time."""

    def calls() -> Iterator[Call]:
        for number in itertools.count():
            yield hostile.completion(prompt=random_ids(hostile, hostile.target.context_len - 2, number), max_tokens=1)

    await hostile.flood_with(calls(), width=60)


async def penalties_on_long_prompts(hostile: Hostile) -> None:
    """Requests all three penalties on prompts that nearly fill the context, with 64 samples each."""
    prompt = random_ids(hostile, hostile.target.context_len - 100, 1)
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5}
    await hostile.flood(hostile.completion(prompt=prompt, n=64, max_tokens=90, **penalties), width=4)


async def min_tokens_with_stops(hostile: Hostile) -> None:
    """Requests min_tokens with stop tokens and biases on the end of the answer, on 32 samples."""
    fields = {"min_tokens": 300, "max_tokens": 300, "ignore_eos": False, "logit_bias": {"2": 100.0}}
    stops = list(range(1, 65))
    await hostile.flood(hostile.completion(n=32, stop_token_ids=stops, temperature=1.0, **fields), width=4)


async def logprobs(hostile: Hostile) -> None:
    """Requests the twenty best log-probabilities of each token, in streams of 64 samples."""
    await hostile.flood(hostile.completion(logprobs=20, n=64, stream=True, max_tokens=200, temperature=1.0), width=4)


async def prompt_logprobs(hostile: Hostile) -> None:
    """Requests twenty log-probabilities for each token of long prompts, with and without echo."""
    prompt = random_ids(hostile, hostile.target.context_len - 20, 2)
    calls = [hostile.completion(prompt=prompt, prompt_logprobs=20, max_tokens=1)]
    calls += [hostile.completion(prompt=[prompt] * 32, logprobs=20, echo=True, max_tokens=4, n=4)]
    await hostile.flood(*calls)


async def generate_with_prompt_logprobs(hostile: Hostile) -> None:
    """Opens streams of /generate that repeat the log-probabilities of a long prompt in every event."""
    sampling = {"max_new_tokens": 100, "ignore_eos": True}
    fields = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 20, "return_text_in_logprobs": True}
    body = {"model": hostile.model, "input_ids": random_ids(hostile, hostile.target.context_len - 110, 3)}
    await hostile.flood(post("/generate", body | fields | {"stream": True, "sampling_params": sampling}))


async def generate_many(hostile: Hostile) -> None:
    """Sends requests of /generate with 2,048 prompts, each with an id and sampling parameters of its own."""
    texts = [f"Count from {i}" for i in range(2048)]
    body = {"model": hostile.model, "text": texts, "rid": [f"r{i}" * 20 for i in range(2048)]}
    await hostile.flood(post("/generate", body | {"sampling_params": [{"max_new_tokens": 8}] * 2048}), width=3)


async def messages(hostile: Hostile) -> None:
    """Sends chats of 1,000, 20,000 and 150,000 messages."""
    lists = [[{"role": "user", "content": "a"}] * size for size in (1_000, 20_000, 150_000)]
    await hostile.flood(*(hostile.chat(messages=chat) for chat in lists), width=4)


async def message_parts(hostile: Hostile) -> None:
    """Sends one message of a hundred thousand parts, and one with twenty thousand tool calls."""
    parts = [{"type": "text", "text": "a"}] * 100_000
    calls = [{"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in range(20_000)]
    bodies = [[{"role": "user", "content": parts}], [{"role": "assistant", "content": "", "tool_calls": calls}]]
    await hostile.flood(*(hostile.chat(messages=chat) for chat in bodies), width=4)


async def tools(hostile: Hostile) -> None:
    """Sends definitions of up to three thousand tools with large schemas."""
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(20)}}
    function = {"description": "d" * 100, "parameters": schema}
    given = [{"type": "function", "function": function | {"name": f"tool_{i}"}} for i in range(3_000)]
    calls = [hostile.chat(tools=given[:size], tool_choice="required") for size in (64, 128, 1_000, 3_000)]
    await hostile.flood(*calls, width=4)


async def tokenize(hostile: Hostile) -> None:
    """Sends texts of one to thirty megabytes to /tokenize, and requests the text of each token."""
    text = "What colour is a lime? " * (30 * MIB // 23)
    bodies = [{"model": hostile.model, "prompt": text[:size]} for size in (MIB, 4 * MIB, 30 * MIB)]
    await hostile.flood(*(post("/tokenize", body | {"return_token_strs": True}) for body in bodies))


async def tokenize_short(hostile: Hostile) -> None:
    """Sends texts of eight kilobytes to /tokenize as fast as they are answered."""
    text = "What colour is a lime? " * 350
    await hostile.flood(post("/tokenize", {"model": hostile.model, "prompt": text}), width=16)


async def tokenize_one_word(hostile: Hostile) -> None:
    """Sends a single word of a megabyte to /tokenize, whose pairs are merged one after another."""
    await hostile.flood(
        post("/tokenize", {"model": hostile.model, "prompt": "a" * MIB}), hostile.completion(prompt="ab" * (MIB // 2))
    )


async def detokenize(hostile: Hostile) -> None:
    """Sends lists of ten thousand to seven million token ids to /detokenize."""
    bodies = [b'{"tokens": [' + b"500," * (size - 1) + b"500]}" for size in (10_000, MIB, 7 * MIB)]
    await hostile.flood(*(post("/detokenize", body) for body in bodies), width=4)


async def embeddings(hostile: Hostile) -> None:
    """Requests embeddings of 2,048 texts at a time."""
    texts = [f"What colour is a lime? {i}" for i in range(2048)]
    await hostile.flood(post("/v1/embeddings", {"model": hostile.model, "input": texts}), width=4)


async def responses_input(hostile: Hostile) -> None:
    """Sends a hundred thousand items to /v1/responses, and to the count of their tokens."""
    items = [{"type": "message", "role": "user", "content": "a"}] * 100_000
    calls = [post("/v1/responses", {"model": hostile.model, "input": items[:size]}) for size in (1_000, 100_000)]
    await hostile.flood(*calls, post("/v1/responses/input_tokens", {"model": hostile.model, "input": items}), width=4)


async def clients_that_leave(hostile: Hostile) -> None:
    """Opens streams whose clients close the connection after the first bytes."""
    request = hostile.written(hostile.completion(stream=True, n=8, max_tokens=400))

    async def leave() -> None:
        async with hostile.connection() as (reader, writer):
            writer.write(request)
            await writer.drain()
            async with asyncio.timeout(5):
                await reader.read(1)

    await hostile.repeated(leave, 16)


ATTACKS: tuple[Attack, ...] = (
    *(many_samples, many_prompts, many_long_answers, prompts_at_the_context_limit, penalties_on_long_prompts),
    *(min_tokens_with_stops, logprobs, prompt_logprobs, generate_with_prompt_logprobs, generate_many, messages),
    *(message_parts, tools, tokenize, tokenize_short, tokenize_one_word, detokenize, embeddings, responses_input),
    clients_that_leave,
)
