"""The sizes of the CUDA graphs for decode steps in which sequences have drafts.

Sequences of a step have any number of drafts, and their rows lie one behind another. So a graph is for a number of
rows. It takes fewer sequences than rows, since the attention launches programs for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

FEW_ROWS = 32  # Rows up to which a graph takes as many sequences: the programs cost little.


def drafted_counts(most_sampled: int) -> tuple[int, ...]:
    """Returns the numbers of rows for which there are graphs. From 96 rows on they grow by at most a third."""
    sizes = {8, 16, *range(32, 96, 16), *range(96, 256, 32), *range(256, most_sampled + 1, 64), most_sampled}
    return tuple(sorted(size for size in sizes if size <= most_sampled))


class DraftShape(NamedTuple):
    """Says how much a graph for drafts has room for."""

    num_seqs: int  # Sequences of the graph.
    most_rows: int  # Most rows of one sequence: its last token and its drafts.


@dataclass(frozen=True, slots=True)
class DraftedSizes:
    """The sizes of one engine's graphs."""

    most_rows: int  # As in DraftShape.
    most_seqs: int  # Sequences of a step.
    counts: tuple[int, ...]  # Rows of each graph, in ascending order.
    first: frozenset[int]  # Those whose graphs a start captures.

    @classmethod
    def of(cls, most_rows: int, most_seqs: int, most_sampled: int, first_seqs: Sequence[int] | None) -> DraftedSizes:
        """Returns the sizes for steps of up to most_sampled rows.

        Args:
            first_seqs: Numbers of sequences for which a start captures the graphs that they need with all drafts. None
                means all graphs.
        """
        counts = drafted_counts(most_sampled)
        if first_seqs is None:
            return cls(most_rows, most_seqs, counts, frozenset(counts))
        wanted = [min(most_sampled, most_rows * num_seqs) for num_seqs in first_seqs]
        return cls(most_rows, most_seqs, counts, frozenset(next(c for c in counts if c >= rows) for rows in wanted))

    def shape(self, num_rows: int) -> DraftShape:
        """Returns the shape of the graph for so many rows. The largest one takes any sequences."""
        num_seqs = num_rows if num_rows == self.counts[-1] else max(FEW_ROWS, num_rows // 2)
        return DraftShape(min(num_seqs, num_rows, self.most_seqs), self.most_rows)

    def fitting(self, num_rows: int, num_seqs: int) -> list[int]:
        """Returns the counts of the graphs that have room for a step, in ascending order."""
        return [count for count in self.counts if count >= num_rows and self.shape(count).num_seqs >= num_seqs]
