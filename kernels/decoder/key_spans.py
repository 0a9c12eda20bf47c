"""Divides the keys that a step's decodes see among the programs of a launch whose grid does not depend on them.

A launch has room for one span of keys for each sequence, and for some more. All spans have at most the same number of
keys, chosen so that they fit. So one long sequence has as many programs as many short ones have together. The host does
this with numpy in about 30 microseconds a step, and a captured launch reads the result.
"""

# B sequences · S = B + num_extra spans · M = min(B, num_extra) merges

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int32]]

SPAN_FIELDS, MERGE_FIELDS = 5, 3
LEAST_KEYS = 128  # keys for which a span is worth a program and a merge
MOST_EXTRA = 128  # more spans than this would make a long merge for one sequence


@dataclass(frozen=True, slots=True)
class SpanRule:
    """The keys that a layer's decodes see, and the spans that they may have. Layers with equal rules share spans."""

    window: int | None  # as in LayerAttention
    chunk: int | None  # as in LayerAttention
    num_extra: int  # Spans beyond one for each sequence. 0 if no sequence is ever divided.

    @classmethod
    def of(cls, window: int | None, chunk: int | None, num_programs: int, num_tiles: int) -> SpanRule:
        """Returns the rule for a GPU that `num_programs` fill, in which each span has `num_tiles` tiles of heads."""
        most_keys = min((bound for bound in (window, chunk) if bound is not None), default=None)
        if most_keys is not None and most_keys <= LEAST_KEYS:
            return cls(window, chunk, 0)
        return cls(window, chunk, min(MOST_EXTRA, max(1, num_programs // num_tiles)))

    @property
    def num_partial(self) -> int:
        """The most spans that belong to divided sequences.

        With c keys a span, no more than num_extra sequences have more than c keys, and they have num_extra * c keys at
        most. Each of them rounds its number of spans up once.
        """
        return 2 * self.num_extra

    def shapes(self, num_seqs: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Returns the shapes of the spans and of the merges, which depend on nothing else."""
        return (num_seqs + self.num_extra, SPAN_FIELDS), (min(num_seqs, self.num_extra), MERGE_FIELDS)

    def divide(self, lens_B: Ints, first_block_B: Ints, rows_B: Ints | None = None) -> tuple[Ints, Ints]:
        """Returns the spans and the merges of a step.

        Args:
            lens_B: Tokens of each sequence, its last one included. A sequence of none has one span without keys.
            first_block_B: Where each sequence's blocks begin in the step's row of blocks.
            rows_B: How many of each sequence's last tokens the step computes. None means one of each. The spans cover
                what any of them sees.

        A span is (sequence, first key, end of its keys, partial result or -1 for a sequence's only span, first block).
        A merge is (sequence, first partial result, their number). Unused rows are -1.
        """
        low_B = np.zeros_like(lens_B)
        first_lens_B = lens_B if rows_B is None else lens_B - np.maximum(rows_B, 1) + 1  # what the first of them sees
        if self.window is not None:
            np.maximum(low_B, first_lens_B - self.window, out=low_B)
        if self.chunk is not None:
            np.maximum(low_B, np.maximum(first_lens_B - 1, 0) // self.chunk * self.chunk, out=low_B)
        seen_B = lens_B - low_B
        num_keys = max(LEAST_KEYS, int(seen_B.max()))
        if self.num_extra > 0:
            fitting = -(-int(seen_B.sum(dtype=np.int64)) // self.num_extra)
            num_keys = max(LEAST_KEYS, -(-fitting // LEAST_KEYS) * LEAST_KEYS)
        counts_B = np.maximum(-(-seen_B // num_keys), 1)
        ends_B = counts_B.cumsum()
        num_spans = int(ends_B[-1])
        spans_shape, merges_shape = self.shapes(len(lens_B))
        spans, merges = (np.full(shape, -1, dtype=np.int32) for shape in (spans_shape, merges_shape))
        assert num_spans <= len(spans)

        whole_BF = np.full((len(lens_B), SPAN_FIELDS), -1, dtype=np.int32)  # The span of all keys of each sequence.
        whole_BF[:, 0] = np.arange(len(lens_B))
        whole_BF[:, 1], whole_BF[:, 2], whole_BF[:, 4] = low_B, lens_B, first_block_B
        used = spans[:num_spans]
        used[:] = whole_BF if num_spans == len(lens_B) else whole_BF.repeat(counts_B, axis=0)
        divided = np.flatnonzero(counts_B > 1)
        if len(divided) > 0:
            counts = counts_B[divided]
            first = counts.cumsum() - counts
            merges[: len(divided)] = np.stack((divided, first, counts), axis=1)
            place = np.arange(counts.sum())
            part = np.flatnonzero(counts_B[used[:, 0]] > 1)
            used[part, 1] += (place - first.repeat(counts)) * num_keys
            used[part, 2] = np.minimum(used[part, 1] + num_keys, used[part, 2])
            used[part, 3] = place
        return spans, merges
