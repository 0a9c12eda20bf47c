"""Lets a drafter that needs to know the tokens draft for a step that was planned before they were known.

While a step verifies drafts, the next one is planned as if all of these were accepted, with room for drafts of each
sequence. Once the host knows the tokens, only the drafts themselves and the launch are left to do, so that the device
waits for less of the host's work. The sequences that get room are those for which the drafter had drafts last time. If
it has fewer tokens than there is room for, the rows left over are computed in vain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import dataclass

from lorafleet.workers.device.draft_verification import DraftVerification
from lorafleet.workers.schedule.sequence import UNKNOWN, Chunk, Sequence
from lorafleet.workers.speculation.drafter import DeviceDrafts, HostDrafter, Wanted


@dataclass(frozen=True, slots=True)
class MadeDrafts:
    """The drafts of a planned step."""

    # For each sequence of the step before: its last token, its drafts, and a filler for each row that is left over.
    tokens: list[int]
    counts: dict[Sequence, int]  # Number of drafts of each sequence that has room for some, and perhaps fewer than fit.
    # Draft tokens of the step, as a share of those for which all sequences would have room that have some or had room.
    found: float


class AwaitingDrafter:
    """A drafter whose drafts may wait for the tokens of a step in flight.

    Args:
        drafter: Makes them.
    """

    def __init__(self, drafter: HostDrafter) -> None:
        self.drafter = drafter
        self._without: set[Sequence] = set()  # Sequences for which it had no drafts last time.

    def propose(self, wanted: Many[Wanted]) -> list[list[int]]:
        found = self.drafter.propose(wanted)
        for entry, draft in zip(wanted, found, strict=True):
            if draft:
                self._without.discard(entry.sequence)
            else:
                self._without.add(entry.sequence)
        return found

    def release(self, sequence: Sequence) -> None:
        self._without.discard(sequence)
        self.drafter.release(sequence)

    def is_current(self, entry: Wanted, step: DraftVerification) -> bool:
        """Returns whether it should have drafts for a sequence behind the step in flight."""
        return entry.sequence in step.rows and entry.sequence not in self._without

    def may_catch_up(self, sequence: Sequence) -> bool:  # noqa: ARG002  it is asked for all sequences of each step
        """Returns False, since a sequence without drafts need not keep others from being planned."""
        return False

    def propose_behind(self, wanted: Many[Wanted], step: DraftVerification) -> AwaitedDrafts:
        """Returns room for the drafts that follow the step in flight."""
        self.drafter.read(step.rows)
        return AwaitedDrafts(self, {entry.sequence: entry.most for entry in wanted})


@dataclass(frozen=True, slots=True)
class AwaitedDrafts:
    """The drafts of a step that has been planned, before they are made."""

    drafter: AwaitingDrafter
    counts: dict[Sequence, int]  # Number of drafts of each sequence for which there is room.

    def make(self, chunks: Many[Chunk], drawn: Mapping[Sequence, list[int]]) -> MadeDrafts:
        """Makes the drafts of these chunks.

        Args:
            drawn: The tokens with which sequences go on, of all that were in the step before.
        """
        going = [chunk for chunk in chunks if chunk.sequence in drawn]
        with _known([chunk.sequence for chunk in going], drawn):
            wanted = [
                Wanted(chunk.sequence, len(chunk.sequence.tokens), max(1, len(chunk.drafts)))
                for chunk in going
                if chunk.sequence in self.counts or not chunk.drafts  # Others have drafts that a grammar forces.
            ]
            found = {entry.sequence: draft for entry, draft in zip(wanted, self.drafter.propose(wanted), strict=True)}
        tokens: list[int] = []
        counts: dict[Sequence, int] = {}
        num_rooms = 0
        for chunk in going:
            sequence = chunk.sequence
            tokens.append(drawn[sequence][-1])
            if sequence in self.counts:
                room = len(chunk.drafts)
                num_rooms += room
                draft = found[sequence][:room]
                counts[sequence] = len(draft)
                tokens += draft
                tokens += [tokens[-1]] * (room - len(draft))
        num_without_room = sum(bool(draft) for sequence, draft in found.items() if sequence not in self.counts)
        wanted_rooms = num_rooms * (1 + num_without_room / max(1, len(counts)))
        return MadeDrafts(tokens, counts, sum(counts.values()) / wanted_rooms if wanted_rooms else 1.0)


UnknownDrafts = DeviceDrafts | AwaitedDrafts  # Drafts that the host does not know when it plans their step.


@contextmanager
def _known(sequences: Many[Sequence], drawn: Mapping[Sequence, list[int]]) -> Iterator[None]:
    """Has the sequences end with these tokens, in place of the one that the host does not know, within the block."""
    for sequence in sequences:
        assert sequence.tokens[-1] == UNKNOWN
        sequence.tokens[-1:] = drawn[sequence]
    try:
        yield
    finally:
        for sequence in sequences:
            sequence.tokens[-len(drawn[sequence]) :] = [UNKNOWN]
