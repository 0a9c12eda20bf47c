"""Tokenizers of adapters: what they make of texts equals the library's, and what they may cost is bounded."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from tokenizers import Tokenizer as Backend

from living import command, family
from lorafleet.api.text.detokenizer import make_detokenizer
from lorafleet.api.text.tokenizer_document import MAX_TOKEN_CHARS
from lorafleet.api.text.tokenizers import (
    AdapterTokenizer,
    Encoders,
    ReadJob,
    TokenizerLimits,
    read_tokenizer,
)
from lorafleet.protocol.errors import AdapterMalformed, InvalidRequest

MAX_IDS = 1000
DEFAULT = TokenizerLimits()
LIMITS = TokenizerLimits(read=replace(DEFAULT.read, cpu_s=10.0), encode=replace(DEFAULT.encode, cpu_s=0.5))
TEXTS = ["hello world", "héllo 日本語 🎉", "", "a\n\n  b<|im_end|>c", "x" * 10_000]
Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def encoders() -> Iterator[Encoders]:
    made = Encoders(LIMITS, max_processes=2)
    yield made
    made.close()


def document_of(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    return document


def read(document: object, encoders: Encoders) -> AdapterTokenizer:
    content = document if isinstance(document, bytes) else json.dumps(document).encode()
    found = read_tokenizer(ReadJob(content, MAX_IDS, [], None), LIMITS)
    return AdapterTokenizer(found, {}, encoders, spells_in_time=True)


@pytest.mark.parametrize("kind", ["byte_tokenizer_folder", "sentencepiece_tokenizer_folder"])
def test_it_makes_the_librarys_tokens_and_texts(kind: str, encoders: Encoders, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    own, library = read(document_of(folder), encoders), Backend.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        for special in (True, False):
            ids = library.encode(text, add_special_tokens=special).ids
            assert own.encode(text, add_special_tokens=special) == ids
            assert own.decode(ids, skip_special_tokens=special) == library.decode(ids, skip_special_tokens=special)
            detokenizer = make_detokenizer(own, [], skip_special_tokens=special)
            streamed = "".join(map(detokenizer.push, ids)) + detokenizer.finish()
            assert streamed == library.decode(ids, skip_special_tokens=special)
    assert own.decode([10**9, MAX_IDS]) == library.decode([10**9, MAX_IDS]) == ""
    assert json.loads(own.to_json()) == json.loads(library.to_str())
    assert [own.token_name(i) for i in range(own.vocab_size)] == [library.id_to_token(i) for i in range(own.vocab_size)]


def set_in(*path: str | int, value: object) -> Change:
    def change(document: dict[str, Any]) -> None:
        part: Any = document
        for key in path[:-1]:
            part = part[key]
        part[path[-1]] = value

    return change


def added(**fields: object) -> Change:
    def change(document: dict[str, Any]) -> None:
        document["added_tokens"].append(document["added_tokens"][0] | fields)

    return change


def replacing(pattern: object, content: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def template_of(**fields: object) -> dict[str, object]:
    return {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}} | fields


HOSTILE: dict[str, tuple[Change, str]] = {
    # --- ids that are sizes ---
    "an id of u32": (set_in("model", "vocab", "zz", value=2**32 - 1), "the token 'zz' the id 4294967295; .* 0 to 999"),
    "an id of 20 million": (set_in("model", "vocab", "zz", value=20_000_000), "the id 20000000"),
    "an id beyond u64": (set_in("model", "vocab", "zz", value=10**30), "the id 1000"),
    "a negative id": (set_in("model", "vocab", "zz", value=-1), "the id -1"),
    "an id of true": (set_in("model", "vocab", "zz", value=True), "the id True"),
    "an added id of u32": (added(id=2**32 - 1, content="zz"), "'zz' the id 4294967295"),
    "an added id of text": (added(id="1", content="zz"), "the id '1'"),
    "an added id that is missing": (added(id=None, content="zz"), "the id None"),
    "as many tokens as bytes allow": (set_in("model", "vocab", value={str(i): i for i in range(1001)}), "1001 tokens"),
    "an id of a template": (
        set_in("post_processor", value=template_of(special_tokens={"x": {"id": "x", "ids": [5000], "tokens": ["x"]}})),
        "the id 5000",
    ),
    "an id of BERT's": (
        set_in("post_processor", value={"type": "BertProcessing", "sep": ["x", 9999], "cls": ["x", 0]}),
        "the id 9999",
    ),
    # --- more than a text, or an answer, is worth ---
    "a long token": (set_in("model", "vocab", "z" * (MAX_TOKEN_CHARS + 1), value=500), "4097 characters; at most 4096"),
    "a long added token": (added(id=500, content="z" * 10**6), "1000000 characters"),
    "an empty added token": (added(id=500, content=""), "not empty"),
    "a template of many parts": (
        set_in("post_processor", value=template_of(single=[{"Sequence": {"id": "A", "type_id": 0}}] * 65)),
        "at most 64",
    ),
    "a template token of many ids": (
        set_in(
            "post_processor",
            value=template_of(special_tokens={"x": {"id": "x", "ids": [1] * 65, "tokens": ["x"] * 65}}),
        ),
        "at most 64",
    ),
    "a decoder that grows": (
        set_in("decoder", value=replacing({"String": "a"}, "a" * 17)),
        "into more than 16",
    ),
    "decoders that grow together": (
        set_in("decoder", value={"type": "Sequence", "decoders": [replacing({"String": "a"}, "aa")] * 5}),
        "into more than 16",
    ),
    "a decoder of nothing": (set_in("decoder", value=replacing({"String": ""}, "a")), "replace only a string"),
    "a decoder by expression": (
        set_in("decoder", value=replacing({"Regex": "(a+)+b"}, "")),
        "replace only a string",
    ),
    "decoders within decoders": (
        set_in(
            "decoder",
            value=__import__("functools").reduce(
                lambda inner, _: {"type": "Sequence", "decoders": [inner]}, range(40), {"type": "Fuse"}
            ),
        ),
        "its decoder is 'Sequence'",
    ),
    # --- what is not known ---
    "an unknown decoder": (set_in("decoder", value={"type": "Program"}), "its decoder is 'Program'"),
    "an unknown post-processor": (set_in("post_processor", value={"type": "Program"}), "its post_processor is"),
    "an unknown model": (set_in("model", "type", value="Program"), "the type 'Program'"),
    "an unknown key": (set_in("programs", value=[]), "unknown key 'programs'"),
    "an unknown flag": (added(id=500, content="zz", runs=True), "'runs'"),
    "no model": (set_in("model", value={}), "no vocabulary"),
    "a model of text": (set_in("model", value="BPE"), "no model"),
    "merges of nothing": (set_in("model", "merges", value=[["no", "such"]]), ""),
    "a lone surrogate": (set_in("model", "vocab", "\ud800", value=500), "surrogates not allowed"),
    "a regex that is none": (
        set_in("pre_tokenizer", value={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated"}),
        "",
    ),
    "a broken charsmap": (
        set_in("normalizer", value={"type": "Precompiled", "precompiled_charsmap": "/////w=="}),
        "",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_tokenizer_is_rejected_by_name_at_little_cost(
    case: str, byte_tokenizer_folder: Path, encoders: Encoders
) -> None:
    change, words = HOSTILE[case]
    document = document_of(byte_tokenizer_folder)
    change(document)
    before = psutil.Process().memory_info().rss
    with pytest.raises(AdapterMalformed, match="tokenizer cannot be read: .*" + words) as caught:
        read(document, encoders)
    assert len(caught.value.message) < 500
    assert not any(word in caught.value.message for word in ("/tmp", "/lib", ".py"))
    caught.value.message.encode()
    assert psutil.Process().memory_info().rss - before < 64 << 20


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{" * 1000, "not valid JSON|nested too deeply"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[]", "must hold an object"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"model": 1, "model": 2}', "occurs twice"),
        (b'{"x": [' + b"[]," * (10 << 20) + b"[]]}", "memory"),
    ],
    ids=["braces", "brackets", "a list", "bytes", "doubled", "many small parts"],
)
def test_bytes_that_are_no_tokenizer_are_rejected_by_name(content: bytes, words: str, encoders: Encoders) -> None:
    with pytest.raises(AdapterMalformed, match=words):
        read(content, encoders)


def test_truncation_and_padding_are_the_servers_matter(byte_tokenizer_folder: Path, encoders: Encoders) -> None:
    document = document_of(byte_tokenizer_folder)
    plain = read(document, encoders).encode("hello")
    document["padding"] = {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None}
    document["padding"] |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    document["truncation"] = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    assert read(document, encoders).encode("hello") == plain


# The engine of regular expressions gives a match up after ten million steps, and each place of a text is a new match.
ENDLESS = {"type": "Split", "pattern": {"Regex": "x*x*x*y"}, "behavior": "Isolated", "invert": False}


def test_a_tokenizer_that_takes_for_ever_is_ended_and_others_go_on(
    byte_tokenizer_folder: Path, encoders: Encoders
) -> None:
    document = document_of(byte_tokenizer_folder)
    good = read(document, encoders)
    slow = read(document | {"pre_tokenizer": ENDLESS}, encoders)
    assert slow.encode("hello", group="a")
    with pytest.raises(InvalidRequest, match=r"tokenizer cannot tokenize this text: .*processor time"):
        slow.encode("x" * 350 + "zy", group="a")
    with pytest.raises(InvalidRequest, match="not tried again for 60 s"):
        slow.encode("hello", group="a")
    assert slow.encode("hello", group="b"), "what one tenant provoked is not held against another"
    assert good.encode("hello", group="a")


def test_a_text_that_needs_too_much_memory_is_rejected_alone(byte_tokenizer_folder: Path) -> None:
    small = TokenizerLimits(encode=replace(DEFAULT.encode, memory_bytes=64 << 20))
    encoders = Encoders(small)
    try:
        own = read(document_of(byte_tokenizer_folder), encoders)
        with pytest.raises(InvalidRequest, match="MiB of memory"):
            own.encode("añ" * (4 << 20), group="a")
        assert own.encode("hello", group="b")
    finally:
        encoders.close()


def test_only_so_many_processes_run_and_none_is_left(byte_tokenizer_folder: Path) -> None:
    def running() -> int:
        return sum(any("tokenizer_program" in part for part in command(one)) for one in family(os.getpid()))

    document, before = document_of(byte_tokenizer_folder), running()
    encoders = Encoders(LIMITS, max_processes=2)
    many = [
        read(document | {"version": "1.0", "added_tokens": document["added_tokens"][:i]}, encoders) for i in (1, 2, 3)
    ]
    threads = [threading.Thread(target=own.encode, args=("hello",)) for own in many * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert many[0].encode("hello") and running() - before <= 2
    encoders.close()
    deadline_s = time.monotonic() + 120
    while running() > before:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
