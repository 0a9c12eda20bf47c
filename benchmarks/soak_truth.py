"""Tracks the valid answers of a name while administrators change it.

Every request is compared with exactly the answers that were valid at some time between its start and its end.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

Answers = list[tuple[int, ...]]  # Answers by prompt, with as many tokens as are certain.

ABSENT = "absent"
MIN_SURE = 4  # The tokens that tell answers apart; a prompt with fewer is not sent.


class Truth:
    """Tracks the valid answers of one name."""

    def __init__(self, answers: dict[str, Answers], now: str) -> None:
        self.answers = answers  # All answers that the name can ever stand for, by label; ABSENT stands for a 404.
        self.now = {now}
        self._watchers: dict[int, set[str]] = {}
        self._numbers = itertools.count()

    @property
    def prompts(self) -> list[int]:
        """The prompts for which every answer has enough certain tokens."""
        by_prompt = zip(*self.answers.values(), strict=True)
        return [i for i, answers in enumerate(by_prompt) if min(map(len, answers)) >= MIN_SURE]

    @contextmanager
    def watched(self) -> Iterator[set[str]]:
        """Yields the labels that are valid now, and adds those that become valid until the block ends."""
        number, seen = next(self._numbers), set(self.now)
        self._watchers[number] = seen
        try:
            yield seen
        finally:
            del self._watchers[number]

    def may_be(self, *labels: str) -> None:
        """Adds labels that may be valid after a change has begun."""
        self.now.update(labels)
        for seen in self._watchers.values():
            seen.update(labels)

    def is_now(self, *labels: str) -> None:
        """Sets the valid labels after the change was acknowledged."""
        self.may_be(*labels)
        self.now = set(labels)

    def fault(self, seen: set[str], prompt: int, tokens: Sequence[int]) -> str | None:
        """Returns why these tokens begin none of the valid answers, or None if they do."""
        valid = [label for label in seen if label != ABSENT]
        if any(_begins_alike(self.answers[label][prompt], tokens) for label in valid):
            return None
        others = [label for label in self.answers if label not in seen]
        stale = [label for label in others if _begins_alike(self.answers[label][prompt], tokens)]
        if stale:
            return f"is version {stale[0]!r}, while {sorted(seen)} was valid"
        return f"is {list(tokens)}; valid was {[self.answers[label][prompt] for label in sorted(valid)] or ABSENT}"


def _begins_alike(sure: Sequence[int], tokens: Sequence[int]) -> bool:
    length = min(len(sure), len(tokens))
    return tuple(sure[:length]) == tuple(tokens[:length])
