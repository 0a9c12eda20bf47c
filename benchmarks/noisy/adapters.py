"""Attacks with adapters whose files are hostile: each is pushed, requested in every way, and removed, over and over."""

from __future__ import annotations

import itertools
import json
import struct
from typing import Any

from noisy.hostile import Attack, Hostile, post
from noisy.pushing import good_files, json_file, push_and_ask, pushed, removed, requests_for

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def base_tokenizer(hostile: Hostile) -> dict[str, Any]:
    tokenizer: dict[str, Any] = json.loads((hostile.target.model_dir / "tokenizer.json").read_text())
    return tokenizer


def tokenizer_files(hostile: Hostile, **changes: object) -> dict[str, bytes]:
    """Returns the base's tokenizer with some parts replaced."""
    config = (hostile.target.model_dir / "tokenizer_config.json").read_bytes()
    return {"tokenizer.json": json_file(base_tokenizer(hostile) | changes), "tokenizer_config.json": config}


def added_token(token_id: int) -> dict[str, object]:
    flags: dict[str, object] = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": f"<|{token_id}|>", "special": True} | flags


async def huge_eos(hostile: Hostile) -> None:
    """Sets eos_token_id to 10^30, which no message to the engine can hold."""
    await push_and_ask(hostile, {"generation_config.json": json_file({"eos_token_id": 10**30})})


async def eos_beyond_the_vocabulary(hostile: Hostile) -> None:
    """Sets eos_token_id to the size of the vocabulary, beside a valid one."""
    ids = [2, hostile.target.vocab_size]
    await push_and_ask(hostile, {"generation_config.json": json_file({"eos_token_id": ids})})


async def many_eos(hostile: Hostile) -> None:
    """Lists a hundred thousand eos ids, of which only a few exist."""
    await push_and_ask(hostile, {"generation_config.json": json_file({"eos_token_id": list(range(100_000))})})


async def odd_generation_config(hostile: Hostile) -> None:
    """Has a generation_config.json with a float as top_k, numbers beyond every float, and lists instead of numbers."""
    text = b'{"top_k": 1.5, "temperature": 1e400, "top_p": [1], "eos_token_id": 2.0, "max_new_tokens": -1}'
    await push_and_ask(hostile, {"generation_config.json": text})


async def tokenizer_with_large_ids(hostile: Hostile) -> None:
    """Has tokens with the ids 20,000,000 and 2^32 - 1 in tokenizer.json."""
    tokens = base_tokenizer(hostile)["added_tokens"]
    for token_id in (20_000_000, 2**32 - 1):
        files = tokenizer_files(hostile, added_tokens=[*tokens, added_token(token_id)])
        await hostile.send(requests_for(hostile, await pushed(hostile, good_files(hostile) | files))[3])
    await push_and_ask(hostile, files)


async def tokenizer_that_pads(hostile: Hostile) -> None:
    """Has a tokenizer.json that pads every text to a billion tokens."""
    pad = {"pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}
    padding = pad | {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None}
    await push_and_ask(hostile, tokenizer_files(hostile, padding=padding))


async def tokenizer_with_a_slow_pattern(hostile: Hostile) -> None:
    """Has a tokenizer.json that splits texts by a regular expression that backtracks forever."""
    split = {"type": "Split", "pattern": {"Regex": "(a|a)*$|(a+)+!!"}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    pre_tokenizer = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    await push_and_ask(hostile, tokenizer_files(hostile, pre_tokenizer=pre_tokenizer))


async def tokenizer_that_grows_texts(hostile: Hostile) -> None:
    """Has a tokenizer.json that replaces each letter by a hundred, and each of these by a hundred."""
    replace = [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}] * 6
    await push_and_ask(hostile, tokenizer_files(hostile, normalizer={"type": "Sequence", "normalizers": replace}))


async def malformed_tokenizer(hostile: Hostile) -> None:
    """Has a tokenizer.json without a model, with wrong types, or cut off."""
    whole = json_file(base_tokenizer(hostile))
    for content in itertools.cycle((b"{}", b"[]", whole[: len(whole) // 2], b'{"model": {"type": "BPE", "vocab": 5}}')):
        name = await pushed(hostile, good_files(hostile) | {"tokenizer.json": content})
        for call in requests_for(hostile, name):
            await hostile.send(call)
        await removed(hostile, name)


async def tokenizer_elsewhere(hostile: Hostile) -> None:
    """Names another file as the tokenizer in special_tokens_map.json and tokenizer_config.json."""
    changes = {"special_tokens_map.json": json_file({"tokenizer_file": "/etc/passwd"})}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "tokenizer_file": "/proc/self/environ"}
    await push_and_ask(hostile, tokenizer_files(hostile) | changes | {"tokenizer_config.json": json_file(config)})


async def ever_new_tokenizers(hostile: Hostile) -> None:
    """Pushes adapters with tokenizers of their own, no two alike, and keeps requesting them."""
    names: list[str] = []

    async def once() -> None:
        tokens = base_tokenizer(hostile)["added_tokens"]
        token = added_token(hostile.target.vocab_size - 1) | {"content": f"<|{hostile.new_name()}|>"}
        files = tokenizer_files(hostile, added_tokens=[*tokens, token])
        names.append(await pushed(hostile, good_files(hostile) | files))
        for name in names[-20:]:
            await hostile.send(post("/tokenize", {"model": name, "prompt": "a" * 2000}))

    await hostile.repeated(once, 4)


async def default_format_that_is_slow(hostile: Hostile) -> None:
    """Has a lorafleet.json that sets a response schema that is slow to compile."""
    item = {"type": "array", "items": {"type": "string", "maxLength": 1000}, "maxItems": 1000}
    schema = {"type": "array", "items": item, "minItems": 50, "maxItems": 100_000}
    given = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}
    await push_and_ask(hostile, {"lorafleet.json": json_file(given)})


def filled(hostile: Hostile, value: bytes) -> bytes:
    """Returns the weights with this value everywhere, in the files' own dtype of two bytes."""
    data = (hostile.target.adapter_dir / WEIGHTS).read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    return data[:begin] + value * ((len(data) - begin) // len(value))


async def weights_that_are_no_numbers(hostile: Hostile) -> None:
    """Has weights that are all NaN, or all the largest finite number."""
    for value in itertools.cycle((b"\xff\x7f", b"\x7f\x7f")):
        name = await pushed(hostile, good_files(hostile) | {WEIGHTS: filled(hostile, value)})
        for call in requests_for(hostile, name):
            await hostile.send(call)
        await removed(hostile, name)


async def header_bombs(hostile: Hostile) -> None:
    """Has safetensors headers that are 2^62 bytes long, nested deeply, or list tens of thousands of tensors."""
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    many = json_file({f"t{i}": entry for i in range(50_000)})
    deep = b'{"a":' * 500_000
    headers = [struct.pack("<Q", 1 << 62), *(struct.pack("<Q", len(text)) + text for text in (many, deep))]
    for header in itertools.cycle(headers):
        await pushed(hostile, good_files(hostile) | {WEIGHTS: header})


async def config_bombs(hostile: Hostile) -> None:
    """Has an adapter_config.json with patterns that backtrack, a rank of a million, or deep nesting."""
    config = json.loads(good_files(hostile)[CONFIG])
    patterns = {f"(x+x+)+y{i}": 4 for i in range(2_000)}
    bombs = [{"target_modules": r"(?:a|.|..|...)*Z?(?<!oj)"}, {"rank_pattern": patterns}, {"r": 10**6}]
    texts = [json_file(config | bomb) for bomb in bombs] + [b'{"a":' * 100_000]
    for text in itertools.cycle(texts):
        await pushed(hostile, good_files(hostile) | {CONFIG: text})


async def more_adapters_than_slots(hostile: Hostile) -> None:
    """Requests forty valid adapters one after another, so that each request needs another one in a slot."""
    names = [await pushed(hostile, good_files(hostile)) for _ in range(40)]
    await hostile.flood(*(hostile.completion(model=name, max_tokens=2) for name in names), width=40)


async def slots_held_by_long_answers(hostile: Hostile) -> None:
    """Requests sixteen adapters with answers that fill the context, so that each keeps its slot for that long."""
    names = [await pushed(hostile, good_files(hostile)) for _ in range(16)]
    room = hostile.target.context_len - 64
    await hostile.flood(*(hostile.completion(model=name, max_tokens=room) for name in names), width=64)


async def ever_new_adapters(hostile: Hostile) -> None:
    """Pushes valid adapters under ever new names, requests each once and keeps them."""

    async def once() -> None:
        name = await pushed(hostile, good_files(hostile))
        await hostile.send(hostile.completion(model=name, max_tokens=1))

    await hostile.repeated(once)


async def ever_new_loads(hostile: Hostile) -> None:
    """Calls /v1/load_lora_adapter with ever new names, for folders that exist, are missing, or are forbidden."""
    sources = [str(hostile.target.sources_dir / "good"), str(hostile.target.sources_dir / "none"), "/etc", "/dev/zero"]

    async def once() -> None:
        name = hostile.new_name()
        for source in sources:
            await hostile.send(post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": source}))
        await hostile.send(post("/v1/unload_lora_adapter", {"lora_name": name}))

    await hostile.repeated(once)


ATTACKS: tuple[Attack, ...] = (
    *(huge_eos, eos_beyond_the_vocabulary, many_eos, odd_generation_config, tokenizer_with_large_ids),
    *(tokenizer_that_pads, tokenizer_with_a_slow_pattern, tokenizer_that_grows_texts, malformed_tokenizer),
    *(tokenizer_elsewhere, ever_new_tokenizers, default_format_that_is_slow, weights_that_are_no_numbers),
    *(header_bombs, config_bombs, more_adapters_than_slots, slots_held_by_long_answers),
    *(ever_new_adapters, ever_new_loads),
)
