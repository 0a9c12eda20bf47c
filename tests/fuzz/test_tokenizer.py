"""Tokenizers with random faults: each is read, with ids in bounds and texts that come back, or rejected in words."""

from __future__ import annotations

import copy
import json
import os
import random
import time
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from lorafleet.api.text.tokenizers import AdapterTokenizer, Encoders, ReadJob, TokenizerLimits, read_tokenizer
from lorafleet.protocol.errors import AdapterMalformed, InvalidRequest

FUZZ_S = float(os.environ.get("LORAFLEET_FUZZ_S", "10")) / 3
FIRST_SEED = int(os.environ.get("LORAFLEET_FUZZ_SEED", "0"))
MAX_IDS = 600
VALUES: list[Any] = [
    *(None, True, -1, 0, 1, 599, 600, 2**31, 2**32 - 1, 2**64, 10**30, 1e308, "", "a", "\ud800", "x" * 5000),
    *([], {}, [[]], {"type": "Sequence"}, {"Regex": "(x+x+)+y"}, {"String": ""}, "Fuse", "BPE", "Unigram"),
]

pytestmark = pytest.mark.timeout(FUZZ_S + 600)


def seed_document() -> dict[str, Any]:
    letters = [chr(i) for i in range(33, 127)]
    tokenizer = Tokenizer(
        models.BPE({letter: i for i, letter in enumerate([*letters, "ab", "abc"])}, [("a", "b"), ("ab", "c")])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 96)])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("_", " "), decoders.ByteFallback(), decoders.Fuse()])
    document: dict[str, Any] = json.loads(tokenizer.to_str())
    return document


def places(part: Any) -> list[tuple[Any, Any]]:
    """Every container within it, with each of its keys."""
    keys = list(part) if isinstance(part, dict) else list(range(len(part))) if isinstance(part, list) else []
    return [(part, key) for key in keys] + [place for key in keys for place in places(part[key])]


def mutated(document: dict[str, Any], draw: random.Random) -> bytes:
    document = copy.deepcopy(document)
    for _ in range(draw.randint(1, 3)):
        found = places(document)
        # The table of the vocabulary has most places; the others decide more.
        others = [place for place in found if not (isinstance(place[0], dict) and "abc" in place[0])]
        container, key = draw.choice(others if draw.random() < 0.8 and others else found or [({"x": 0}, "x")])
        if draw.random() < 0.2:
            del container[key]
        else:
            container[key] = copy.deepcopy(draw.choice(VALUES))
    content = json.dumps(document).encode()
    cut = draw.randrange(len(content)) if draw.random() < 0.05 else len(content)
    return content[:cut]


def test_whatever_a_tokenizer_s_file_holds_it_is_read_or_rejected() -> None:
    document, encoders, limits = seed_document(), Encoders(), TokenizerLimits()
    words: list[str] = []
    num_read, seed, ends_s = 0, FIRST_SEED, time.monotonic() + FUZZ_S
    try:
        while time.monotonic() < ends_s or not num_read:
            content = mutated(document, random.Random(seed))
            try:
                read = read_tokenizer(ReadJob(content, MAX_IDS, [], None), limits)
                own = AdapterTokenizer(read, {}, encoders, spells_in_time=False)
                num_read += 1
                assert own.vocab_size <= MAX_IDS, seed
                own.decode(list(range(-1, own.vocab_size + 2))).encode()
                assert all(0 <= token < MAX_IDS for token in own.encode("abcab a_b <s>")), seed
            except (AdapterMalformed, InvalidRequest) as error:
                words.append(error.message)
            seed += 1
    finally:
        encoders.close()
    assert all(word.encode() and len(word) < 500 and "/tmp" not in word for word in words)
