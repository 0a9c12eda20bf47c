"""Drafts what followed the last tokens of a sequence when they stood before: in its prompt or its answer, or in a past
answer of its adapter.

It needs no model, and is right where answers repeat: code that is edited, documents that are quoted, JSON, loops.
Source of the method: prompt lookup decoding (Saxena, 2023), vLLM's method "ngram".
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass

from lorafleet.protocol.engine_config import SpeculativeConfig
from lorafleet.workers.schedule.sequence import UNKNOWN, Sequence
from lorafleet.workers.speculation.drafter import Wanted
from lorafleet.workers.speculation.ngram_index import NgramIndex
from lorafleet.workers.speculation.past_answers import PastAnswers, PastText, owner_of

# Tokens that one call adds to indexes, in all sequences together: some .3 microseconds for each. Long prompts take
# several steps, and have no drafts before.
INDEXED_TOKENS = 2048
READ_TOKENS = 8192  # The same while a step runs.


@dataclass(frozen=True, slots=True)
class FollowedText:
    """The tokens of a sequence."""

    index: NgramIndex
    owner: Hashable


class NgramDrafter:
    def __init__(self, config: SpeculativeConfig) -> None:
        self._lengths = config.prompt_lookup_min, config.prompt_lookup_max
        self._followed: dict[Sequence, FollowedText] = {}
        self._past = PastAnswers(*self._lengths)

    def propose(self, wanted: Many[Wanted]) -> list[list[int]]:
        """Returns the tokens that followed the longest match of each sequence's last tokens. Of equally long ones it is
        the sequence's own."""
        drafts: list[list[int]] = []
        num_left = INDEXED_TOKENS
        for sequence, num_known, most in wanted:
            text = self._text_of(sequence)
            index, past = text.index, self._past.of(text.owner)
            num_left -= _index_some(sequence.tokens, num_known, index, past, num_left)
            is_read = index.num_indexed == num_known
            drafts.append(_draft(sequence.tokens, index, past, num_known, most) if is_read else [])
        return drafts

    def read(self, sequences: Iterable[Sequence]) -> None:
        num_left = READ_TOKENS
        for sequence in sequences:
            text = self._text_of(sequence)
            num_known = len(sequence.tokens) - (sequence.tokens[-1] == UNKNOWN)
            num_left -= _index_some(sequence.tokens, num_known, text.index, self._past.of(text.owner), num_left)

    def release(self, sequence: Sequence) -> None:
        if self._followed.pop(sequence, None) is not None:
            self._past.add(sequence)

    def _text_of(self, sequence: Sequence) -> FollowedText:
        text = self._followed.get(sequence)
        if text is None:
            index = NgramIndex(*self._lengths, capacity=sequence.num_prompt + sequence.max_tokens)
            text = self._followed[sequence] = FollowedText(index, owner_of(sequence))
        return text


def _index_some(tokens: Many[int], end: int, index: NgramIndex, past: Many[PastText], most: int) -> int:
    """Adds up to `most` tokens to indexes: those of a sequence before `end`, then those of past texts. Returns how many
    there were."""
    num_added = index.extend(tokens, min(end, index.num_indexed + most))
    for text in past:
        if text.index.num_indexed < len(text.tokens):
            num_added += text.index_some(most - num_added)
    return num_added


def _draft(tokens: Many[int], index: NgramIndex, texts: Many[PastText], end: int, most: int) -> list[int]:
    """Returns the draft behind a sequence's tokens, which end at `end` and are indexed, from these or from past
    texts."""
    place, longest = index.find(tokens, tokens, end, index.last_hash)
    draft = _copied(tokens, place, end, most) if longest else []
    for text in texts:
        if longest == index.max_length:
            break
        place, length = text.index.find(text.tokens, tokens, end, index.last_hash)
        if length > longest:
            found = _until_end(text.tokens[place : place + most])
            if found:
                draft, longest = found, length
    return draft


def _copied(tokens: Many[int], place: int, end: int, count: int) -> list[int]:
    """Returns the tokens from `place` on. Where these reach `end`, the copy is continued: a text that repeats a phrase
    goes on repeating it."""
    if place + count <= end:
        return list(tokens[place : place + count])
    return [tokens[place + i % (end - place)] for i in range(count)]


def _until_end(tokens: Many[int]) -> list[int]:
    """Returns the tokens before the end of a past answer."""
    draft = list(tokens)
    return draft[: draft.index(UNKNOWN)] if UNKNOWN in draft else draft
