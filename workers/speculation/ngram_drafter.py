"""Drafts what followed the last tokens of a sequence when they stood before, in its prompt or in its answer.

It needs no model, and is right where answers repeat: code that is edited, documents that are quoted, JSON, loops.
Source of the method: prompt lookup decoding (Saxena, 2023), vLLM's method "ngram".
"""

from __future__ import annotations

from collections.abc import Sequence as Many

from lorafleet.protocol.engine_config import SpeculativeConfig
from lorafleet.workers.schedule.sequence import Sequence
from lorafleet.workers.speculation.drafter import Wanted
from lorafleet.workers.speculation.ngram_index import NgramIndex

# Tokens that one step adds to indexes, in all sequences together: about half a millisecond. Long prompts take several
# steps, and have no drafts before.
INDEXED_TOKENS = 1024


class NgramDrafter:
    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._indexes: dict[Sequence, NgramIndex] = {}

    def propose(self, wanted: Many[Wanted]) -> list[list[int]]:
        """Returns the tokens that followed the longest match of each sequence's last tokens."""
        drafts: list[list[int]] = []
        num_left = INDEXED_TOKENS
        for sequence, num_known, most in wanted:
            index = self._index_of(sequence)
            before = index.num_indexed
            index.extend(sequence.tokens, min(num_known, before + num_left))
            num_left -= index.num_indexed - before
            place = index.find(sequence.tokens, num_known) if index.num_indexed == num_known else None
            drafts.append([] if place is None else _copied(sequence.tokens, place, num_known, most))
        return drafts

    def release(self, sequence: Sequence) -> None:
        self._indexes.pop(sequence, None)

    def _index_of(self, sequence: Sequence) -> NgramIndex:
        index = self._indexes.get(sequence)
        if index is None:
            shortest, longest = self._config.prompt_lookup_min, self._config.prompt_lookup_max
            capacity = sequence.num_prompt + sequence.max_tokens
            index = self._indexes[sequence] = NgramIndex(shortest, longest, capacity)
        return index


def _copied(tokens: Many[int], place: int, end: int, count: int) -> list[int]:
    """Returns the tokens from `place` on. Where these reach `end`, the copy is continued: a text that repeats a phrase
    goes on repeating it."""
    return [tokens[place + i % (end - place)] for i in range(count)]
