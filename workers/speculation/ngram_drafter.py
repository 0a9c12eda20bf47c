"""Drafts what followed the last tokens of a sequence when they stood before: in its prompt or its answer, or in a past
answer of its adapter.

It needs no model, and is right where answers repeat: code that is edited, documents that are quoted, JSON, loops.
Source of the method: prompt lookup decoding (Saxena, 2023), vLLM's method "ngram".
"""

from __future__ import annotations

from collections.abc import Sequence as Many

from lorafleet.protocol.engine_config import SpeculativeConfig
from lorafleet.workers.schedule.sequence import UNKNOWN, Sequence
from lorafleet.workers.speculation.drafter import Wanted
from lorafleet.workers.speculation.ngram_index import NgramIndex
from lorafleet.workers.speculation.past_answers import PastAnswers, PastText

# Tokens that one step adds to indexes, in all sequences together: about half a millisecond. Long prompts take several
# steps, and have no drafts before.
INDEXED_TOKENS = 1024


class NgramDrafter:
    def __init__(self, config: SpeculativeConfig) -> None:
        self._lengths = config.prompt_lookup_min, config.prompt_lookup_max
        self._indexes: dict[Sequence, NgramIndex] = {}
        self._past = PastAnswers(*self._lengths)

    def propose(self, wanted: Many[Wanted]) -> list[list[int]]:
        """Returns the tokens that followed the longest match of each sequence's last tokens. Of equally long ones it is
        the sequence's own."""
        drafts: list[list[int]] = []
        num_left = INDEXED_TOKENS
        for sequence, num_known, most in wanted:
            index = self._index_of(sequence)
            before = index.num_indexed
            index.extend(sequence.tokens, min(num_known, before + num_left))
            num_left -= index.num_indexed - before
            texts = self._past.of(sequence)
            for text in texts:
                num_left -= text.index_some(num_left)
            drafts.append(_draft(sequence.tokens, index, texts, num_known, most))
        return drafts

    def release(self, sequence: Sequence) -> None:
        if self._indexes.pop(sequence, None) is not None:
            self._past.add(sequence)

    def _index_of(self, sequence: Sequence) -> NgramIndex:
        index = self._indexes.get(sequence)
        if index is None:
            capacity = sequence.num_prompt + sequence.max_tokens
            index = self._indexes[sequence] = NgramIndex(*self._lengths, capacity)
        return index


def _draft(tokens: Many[int], index: NgramIndex, texts: Many[PastText], num_known: int, most: int) -> list[int]:
    """Returns the draft behind a sequence's known tokens, from its own index or from past texts."""
    draft, longest = list[int](), 0
    own = index.find(tokens, tokens, num_known) if index.num_indexed == num_known else None
    if own is not None:
        draft, longest = _copied(tokens, own.place, num_known, most), own.length
    for text in texts:
        match = text.find(tokens, num_known)
        if match is not None and match.length > longest:
            found = _until_end(text.tokens[match.place : match.place + most])
            if found:
                draft, longest = found, match.length
    return draft


def _copied(tokens: Many[int], place: int, end: int, count: int) -> list[int]:
    """Returns the tokens from `place` on. Where these reach `end`, the copy is continued: a text that repeats a phrase
    goes on repeating it."""
    return [tokens[place + i % (end - place)] for i in range(count)]


def _until_end(tokens: Many[int]) -> list[int]:
    """Returns the tokens before the end of a past answer."""
    draft = list(tokens)
    return draft[: draft.index(UNKNOWN)] if UNKNOWN in draft else draft
