"""Attacks with request fields that are too long, too many, too large, or expensive to read."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator

from noisy.hostile import Attack, Call, Hostile, post

SIZES = (100, 1_000, 10_000, 100_000)  # One of them is likely just below a bound.
MIB = 1 << 20


async def logit_bias(hostile: Hostile) -> None:
    """Sends logit_bias with 100 to 100,000 entries, for long answers."""
    vocab_size = hostile.target.vocab_size
    biases = [{str(i % vocab_size) if size <= vocab_size else str(i): 1.0 for i in range(size)} for size in SIZES]
    await hostile.flood(*(hostile.completion(logit_bias=bias, max_tokens=200) for bias in biases))


async def logit_bias_with_zeros(hostile: Hostile) -> None:
    """Sends logit_bias that names one token 100,000 times, with ever more zeros before its number."""
    bias = {"5".zfill(1 + i % 5_000): 1.0 for i in range(100_000)}
    await hostile.flood(hostile.completion(logit_bias=bias, max_tokens=200), width=4)


async def stop_token_ids(hostile: Hostile) -> None:
    """Sends stop_token_ids of up to two megabytes."""
    lists = [[i % hostile.target.vocab_size for i in range(size)] for size in (*SIZES, 400_000)]
    await hostile.flood(*(hostile.completion(stop_token_ids=ids, max_tokens=200) for ids in lists))


async def stop_strings(hostile: Hostile) -> None:
    """Sends sixteen stop strings of 100 to 100,000 characters each, whose beginnings all match."""
    texts = [["a" * (size - i) + "b" for i in range(16)] for size in SIZES]
    await hostile.flood(*(hostile.completion(stop=stop, stream=True, max_tokens=200) for stop in texts))


async def request_ids(hostile: Hostile) -> None:
    """Sends request ids of up to a megabyte, for streams that repeat them in each chunk."""
    sizes = (64, 1_000, 100_000, MIB)
    calls = [hostile.completion(request_id="r" * size, stream=True, max_tokens=200) for size in sizes]
    await hostile.flood(*calls)


async def request_id_headers(hostile: Hostile) -> None:
    """Sends x-request-id headers of up to 30 kB, for streams."""
    body = hostile.completion(stream=True, n=16, max_tokens=200).content
    await hostile.flood(
        *(post("/v1/completions", body, **{"x-request-id": "h" * size}) for size in (200, 4000, 30_000))
    )


async def cache_salts(hostile: Hostile) -> None:
    """Sends a cache_salt of up to a megabyte, a different one in each request."""

    def calls() -> Iterator[Call]:
        for number in itertools.count():
            yield hostile.completion(cache_salt=f"{number}-" + "s" * (64, 10_000, MIB)[number % 3], max_tokens=1)

    await hostile.flood_with(calls())


async def deep_nesting(hostile: Hostile) -> None:
    """Sends bodies of a hundred thousand brackets, in fields and as the whole body."""
    deep = b"[" * 100_000 + b"]" * 100_000
    objects = b'{"a":' * 50_000 + b"1" + b"}" * 50_000
    bodies = [
        deep,
        objects,
        b'{"model": "m", "prompt": ' + deep + b"}",
        b'{"messages": ' + objects + b', "model": "m"}',
    ]
    await hostile.flood(*(post("/v1/completions", body) for body in bodies))


async def empty_strings(hostile: Hostile) -> None:
    """Sends megabytes of empty strings before the model's name, which the router looks for."""
    bodies = [b'{"x": [' + b'"",' * (size // 3) + b'""], "model": "m"}' for size in (MIB // 8, MIB, 8 * MIB)]
    await hostile.flood(*(post("/v1/completions", body) for body in bodies), width=3)


async def many_fields(hostile: Hostile) -> None:
    """Sends bodies with two hundred thousand unknown fields, or with one field repeated as often."""
    unknown = b"{" + b",".join(b'"f%d": 1' % i for i in range(200_000)) + b"}"
    doubled = b"{" + b'"model": "m",' * 200_000 + b'"prompt": "a"}'
    await hostile.flood(post("/v1/completions", unknown), post("/v1/completions", doubled), width=4)


async def huge_numbers(hostile: Hostile) -> None:
    """Sends numbers beyond the range of a float, and with a hundred thousand digits, in every numeric field."""
    names = ("max_tokens", "n", "seed", "temperature", "top_k", "top_p", "min_tokens", "priority", "prompt_logprobs")
    values = (b"1e999", b"-1e400", b"1" + b"0" * 309, b"9" * 4_000, b"9" * 100_000)
    bodies = [b'{"model": "m", "prompt": "a", "%s": %s}' % (n.encode(), v) for n in names for v in values]
    ids = [b'{"model": "m", "prompt": [%s], "stop_token_ids": [%s]}' % (v, v) for v in values]
    await hostile.flood(*(post("/v1/completions", body) for body in (*bodies, *ids)))


async def odd_unicode(hostile: Hostile) -> None:
    """Sends combining marks, lone surrogates and zero bytes in prompts, names and stop strings."""
    texts = ["a" + "\u0301" * 20_000, "\\ud800" * 2_000, "\0" * 20_000, "\U0001f468\u200d" * 10_000, "\u202e" * 20_000]
    calls = [hostile.completion(prompt=text, max_tokens=4) for text in texts]
    calls += [hostile.completion(model=text[:300], stop=[text[:1000]]) for text in texts]
    await hostile.flood(*calls)


async def unknown_models(hostile: Hostile) -> None:
    """Requests models that do not exist, a different one in each request."""
    await hostile.flood_with((hostile.completion(model=hostile.new_name()) for _ in itertools.count()), width=16)


async def mixes(hostile: Hostile) -> None:
    """Requests mixes of adapters with ever new weights, each of which needs a slot."""

    def calls() -> Iterator[Call]:
        for number in itertools.count(1):
            weights = [1.0 + number / 1e6, 0.5]
            yield hostile.completion(model="pirate+shout", lora_weights=weights, max_tokens=4)

    await hostile.flood_with(calls(), width=16)


async def wrong_keys(hostile: Hostile) -> None:
    """Sends requests with wrong keys as fast as they are rejected."""
    await hostile.flood(hostile.completion(), hostile.chat(), width=16, key="lf-wrong" + "x" * 40)


async def long_keys(hostile: Hostile) -> None:
    """Sends keys of up to 30 kB, and odd authorization schemes."""
    headers = [
        {"authorization": "Bearer " + "k" * 30_000},
        {"x-api-key": "k" * 8_000},
        {"authorization": "Basic ====="},
    ]
    body = hostile.completion().content
    await hostile.flood(*(post("/v1/completions", body, **header) for header in headers), key=None)


async def bodies_without_a_key(hostile: Hostile) -> None:
    """Sends bodies of 30 MB without a key."""
    body = b'{"model": "m", "prompt": "' + b"a" * (30 * MIB) + b'"}'
    await hostile.flood(post("/v1/completions", body), width=4, key=None)


async def bodies_over_the_bound(hostile: Hostile) -> None:
    """Sends bodies of 40 MB, with a content length and as chunks without one."""

    async def chunks() -> AsyncIterator[bytes]:
        yield b'{"model": "m", "prompt": "'
        for _ in range(40):
            yield b"a" * MIB

    whole = post("/v1/completions", b'{"model": "m", "prompt": "' + b"a" * (40 * MIB) + b'"}')
    await hostile.flood(whole, Call("POST", "/v1/completions", chunks), width=2)


async def bodies_at_the_bound(hostile: Hostile) -> None:
    """Sends bodies of 30 MB: one text, and seven million numbers."""
    text = post("/v1/completions", b'{"model": "m", "prompt": "' + b"a" * (30 * MIB) + b'"}')
    ids = post("/v1/completions", b'{"model": "m", "prompt": [' + b"5," * (7 * MIB) + b"5]}")
    await hostile.flood(text, ids, width=2)


async def queue_timeouts(hostile: Hostile) -> None:
    """Sends requests with a queue timeout of a millisecond, a day, or an invalid number of seconds."""
    body = hostile.completion(n=16).content
    values = ("0.001", "86400", "1e300", "-1", "nan", "9" * 300)
    await hostile.flood(*(post("/v1/completions", body, **{"x-queue-timeout-seconds": v}) for v in values), width=16)


async def template_arguments(hostile: Hostile) -> None:
    """Sends chat_template_kwargs of a megabyte, flat and nested."""
    flat = {f"k{i}": "v" * 10 for i in range(50_000)}
    nested: dict[str, object] = {}
    for _ in range(200):
        nested = {"a": nested}
    await hostile.flood(hostile.chat(chat_template_kwargs=flat), hostile.chat(chat_template_kwargs=nested), width=4)


ATTACKS: tuple[Attack, ...] = (
    *(logit_bias, logit_bias_with_zeros, stop_token_ids, stop_strings, request_ids, request_id_headers, cache_salts),
    *(
        deep_nesting,
        empty_strings,
        many_fields,
        huge_numbers,
        odd_unicode,
        unknown_models,
        mixes,
        wrong_keys,
        long_keys,
    ),
    *(bodies_without_a_key, bodies_over_the_bound, bodies_at_the_bound, queue_timeouts, template_arguments),
)
