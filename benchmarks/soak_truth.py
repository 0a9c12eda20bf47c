"""What a name may be answered with, while administrators change it: every request is held against what was valid at
some time between its start and its end, and no more.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

Answers = list[tuple[int, ...]]  # by prompt; as many tokens as are sure

ABSENT = "absent"
MIN_SURE = 4  # tokens that tell answers apart; a prompt with fewer is not asked


class Truth:
    """answers: by label, of all that the name can ever stand for. ABSENT is 404."""

    def __init__(self, answers: dict[str, Answers], now: str) -> None:
        self.answers = answers
        self.now = {now}
        self._watchers: dict[int, set[str]] = {}
        self._numbers = itertools.count()

    @property
    def prompts(self) -> list[int]:
        """Those that every answer is sure enough of."""
        by_prompt = zip(*self.answers.values(), strict=True)
        return [i for i, answers in enumerate(by_prompt) if min(map(len, answers)) >= MIN_SURE]

    @contextmanager
    def watched(self) -> Iterator[set[str]]:
        """The labels that have been valid since, kept up to date until the end."""
        number, seen = next(self._numbers), set(self.now)
        self._watchers[number] = seen
        try:
            yield seen
        finally:
            del self._watchers[number]

    def may_be(self, *labels: str) -> None:
        """A change has begun, after which it may be any of these too."""
        self.now.update(labels)
        for seen in self._watchers.values():
            seen.update(labels)

    def is_now(self, *labels: str) -> None:
        """The change was acknowledged."""
        self.may_be(*labels)
        self.now = set(labels)

    def fault(self, seen: set[str], prompt: int, tokens: Sequence[int]) -> str | None:
        """Why this is no answer of what was valid; None where it is. tokens may be the beginning of an answer."""
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
