from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from lorafleet.api.text.detokenizer import make_detokenizer
from lorafleet.api.text.tokenizer import Tokenizer


def pieces(tokenizer: Tokenizer, ids: list[int], *, prompt: list[int] | None = None, skip: bool = True) -> list[str]:
    detokenizer = make_detokenizer(tokenizer, prompt or [], skip_special_tokens=skip)
    return [*map(detokenizer.push, ids), detokenizer.finish()]


@pytest.mark.parametrize("skip", [True, False])
def test_pieces_of_random_tokens_join_to_the_full_decode(tokenizer: Tokenizer, skip: bool) -> None:
    rng = random.Random(1)
    for _ in range(2000):
        ids = [rng.randrange(tokenizer.vocab_size + 3) for _ in range(rng.randrange(12))]
        assert "".join(pieces(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_no_piece_ends_inside_a_character(tokenizer: Tokenizer, sentencepiece_tokenizer: Tokenizer) -> None:
    text = "日🎉é and ascii"
    for some in (tokenizer, sentencepiece_tokenizer):
        shown = pieces(some, some.encode(text))
        assert not any("\ufffd" in piece for piece in shown)
        assert "".join(shown) == some.decode(some.encode(text))


def test_an_unfinished_character_is_flushed_as_the_replacement_character(tokenizer: Tokenizer) -> None:
    half = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xf0")
    assert pieces(tokenizer, [half]) == ["", "\ufffd"]


def test_sentencepiece_keeps_the_space_between_prompt_and_answer(sentencepiece_tokenizer: Tokenizer) -> None:
    hello, world = (sentencepiece_tokenizer._backend.get_vocab()[t] for t in ("▁hello", "▁world"))
    assert "".join(pieces(sentencepiece_tokenizer, [world, hello], prompt=[hello])) == " world hello"
    assert "".join(pieces(sentencepiece_tokenizer, [world, hello])) == "world hello"


def test_sentencepiece_completes_a_character_begun_in_the_prompt(sentencepiece_tokenizer: Tokenizer) -> None:
    ids = sentencepiece_tokenizer.encode("日")
    assert "".join(pieces(sentencepiece_tokenizer, ids[1:], prompt=ids[:1])) == "日"


def test_sentencepiece_pieces_of_words_join_to_the_full_decode(sentencepiece_tokenizer: Tokenizer) -> None:
    rng = random.Random(2)
    words = list(range(259, sentencepiece_tokenizer.vocab_size))
    for _ in range(500):
        ids = [rng.choice([*words, 1, 2]) for _ in range(rng.randrange(12))]
        assert "".join(pieces(sentencepiece_tokenizer, ids)) == sentencepiece_tokenizer.decode(ids)


class CountedDecoding:
    """A tokenizer that counts the tokens that it is asked to decode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.num_decoded = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.num_decoded += len(token_ids)
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("kind", ["skipped", "unknown", "half a character", "blank"])
def test_the_work_for_tokens_without_a_text_is_linear(sentencepiece_tokenizer: Tokenizer, kind: str) -> None:
    vocabulary = sentencepiece_tokenizer._backend.get_vocab()
    tokens = {
        "skipped": vocabulary["</s>"],
        "unknown": sentencepiece_tokenizer.vocab_size,
        "half a character": vocabulary["<0x80>"],
        "blank": vocabulary["▁"],
    }
    counted: Any = CountedDecoding(sentencepiece_tokenizer)
    given = pieces(counted, 2000 * [tokens[kind]])
    assert counted.num_decoded <= 130 * 2000
    assert "".join(given) == sentencepiece_tokenizer.decode(2000 * [tokens[kind]])


def test_skipped_tokens_do_not_part_a_word_from_its_space(sentencepiece_tokenizer: Tokenizer) -> None:
    vocabulary = sentencepiece_tokenizer._backend.get_vocab()
    ids = [vocabulary["▁hello"], *(100 * [vocabulary["</s>"]]), vocabulary["▁world"]]
    assert "".join(pieces(sentencepiece_tokenizer, ids)) == "hello world"
    assert "".join(pieces(sentencepiece_tokenizer, ids[1:], prompt=ids[:1])) == " world"
