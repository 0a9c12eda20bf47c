"""Defines the interface of drafters, which propose the next tokens of sequences.

A step verifies the proposals. So a drafter decides how fast answers come, and never what they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from lorafleet.workers.schedule.sequence import Sequence


class Wanted(NamedTuple):
    """A sequence for which drafts are wanted."""

    sequence: Sequence
    num_known: int  # The drafts follow its first num_known tokens, which the host knows.
    most: int  # Largest number of draft tokens, at least 1.


class Drafter(Protocol):
    def propose(self, wanted: Many[Wanted]) -> list[list[int]]:
        """Returns the draft tokens for each entry, which may be none. It may be called twice for a step: first to learn
        whether there would be drafts that pay, then for the drafts themselves.

        The known tokens of a sequence never become fewer.
        """
        ...

    def release(self, sequence: Sequence) -> None:
        """Forgets a sequence that has ended. It need not be known."""
        ...


class HostDrafter(Drafter, Protocol):
    """A drafter that works on the host."""

    def read(self, sequences: Iterable[Sequence]) -> None:
        """Takes in the known tokens of sequences for which drafts will be wanted, while a step runs. propose() takes in
        what is left of them, for which the device waits."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceDrafts:
    """Draft tokens that the host does not know."""

    token_WK: Tensor  # int64, on the device. A row holds the drafts of one sequence, and then arbitrary tokens.
    row_by_sequence: dict[Sequence, int]
    counts: dict[Sequence, int]  # Number of each sequence's drafts.
