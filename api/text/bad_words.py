"""Turns the words of `bad_words` into the sequences of token IDs that an answer must not contain."""

from __future__ import annotations

from collections.abc import Sequence


def spellings(words: Sequence[str]) -> list[str]:
    """Returns two texts for each word, without and with a space before it. Tokenizers write most words differently at
    the beginning of a text and within it."""
    return [text for word in words for text in (word.lstrip(), " " + word.lstrip())]


def token_sequences(encoded: Sequence[list[int]]) -> list[list[int]]:
    """Returns the sequences to ban from the token IDs of each of the spellings().

    The second spelling counts unless it is the first one behind a token for the space, which stays allowed.
    Source: vLLM, SamplingParams.update_from_tokenizer, which bans the second spelling only if it has as many tokens as
    the first. So vLLM allows " fox" where it is one token and "fox" is three.
    """
    sequences: list[list[int]] = []
    for bare, spaced in zip(encoded[::2], encoded[1::2], strict=True):
        if bare:
            sequences.append(bare)
        if bare and spaced[0] != bare[0] and spaced[1:] != bare:
            sequences.append(spaced)
    return sequences
