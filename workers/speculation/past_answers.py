"""Holds past answers of each adapter, since the next one may be alike: the same JSON keys, the same phrases.

Sequences share them as they share KV blocks: only with the same weights of base and adapter, tenant and cache salt. So
nobody finds out from the speed of an answer what another tenant was answered.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable

from lorafleet.protocol.lru_cache import LRUCache
from lorafleet.workers.schedule.sequence import UNKNOWN, Sequence
from lorafleet.workers.speculation.ngram_index import NgramIndex

MOST_OWNERS = 64  # Adapters, by tenant and salt, whose answers are held; those of the least recently used are dropped.
TEXT_TOKENS = 1 << 13  # Tokens of a text. An owner has two texts: one that grows, and the one before it.
ANSWER_TOKENS = 1 << 10  # Last tokens of one answer that are held.


class PastText:
    """The answers of one owner, one after another, until there are TEXT_TOKENS."""

    def __init__(self, min_length: int, max_length: int) -> None:
        self.tokens = array("i")
        self.index = NgramIndex(min_length, max_length, TEXT_TOKENS)

    def index_some(self, most: int) -> int:
        """Indexes up to so many more tokens, and returns how many."""
        return self.index.extend(self.tokens, min(len(self.tokens), self.index.num_indexed + most))


class PastAnswers:
    """The answers of one engine.

    Args:
        min_length: As in NgramIndex, and so is max_length.
    """

    def __init__(self, min_length: int, max_length: int) -> None:
        self._lengths = min_length, max_length
        self._texts: LRUCache[Hashable, list[PastText]] = LRUCache(MOST_OWNERS)

    def of(self, owner: Hashable) -> list[PastText]:
        """Returns the texts of an owner, the newest first."""
        return self._texts.get(owner) or []

    def add(self, sequence: Sequence) -> None:
        """Adds the answer of a sequence that has ended."""
        answer = sequence.tokens[sequence.num_prompt :][-ANSWER_TOKENS:]
        if answer and answer[-1] == UNKNOWN:
            answer.pop()
        if not answer:
            return
        owner = owner_of(sequence)
        texts = self.of(owner)
        if not texts or len(texts[0].tokens) + len(answer) >= TEXT_TOKENS:
            texts = [PastText(*self._lengths), *texts[:1]]
            self._texts.put(owner, texts)
        texts[0].tokens.extend(answer)
        texts[0].tokens.append(UNKNOWN)  # Nothing follows an answer.


def owner_of(sequence: Sequence) -> Hashable:
    """Returns what the sequences have in common that share past answers."""
    return sequence.tenant, sequence.cache_salt, sequence.digest, sequence.base.digest
