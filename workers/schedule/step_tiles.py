"""Counts what the device computes for a step, which is more than the step's tokens: it computes whole tiles.

A step with prompts runs the smallest CUDA graph that holds its tokens. Attention gives the queries of a prompt to
programs in tiles, and a tile that is not full takes as long as a full one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepTiles:
    """The sizes in which a device computes. The defaults mean that it computes what it is asked for."""

    graph_sizes: Many[int] = ()  # Tokens of each graph, in ascending order. Larger steps have no graph.
    queries: int = 1  # Queries of one prompt that attention computes together.

    def tokens(self, num_tokens: int) -> int:
        """Returns the number of tokens that the linears compute in a step of so many."""
        fitting = bisect_left(self.graph_sizes, num_tokens)
        return self.graph_sizes[fitting] if fitting < len(self.graph_sizes) else num_tokens

    def pairs(self, num_tokens: int, context: int) -> int:
        """Returns the pairs of a query and a key that attention computes for a prompt's next tokens, which come behind
        `context` others."""
        tiles = -(-num_tokens // self.queries)
        return self.queries * (tiles * context + self.queries * tiles * (tiles + 1) // 2)

    def filled(self, num_tokens: int, num_others: int) -> int:
        """Returns the largest number of a prompt's tokens that takes no longer than num_tokens of them, beside
        num_others."""
        in_graph = self.tokens(num_others + num_tokens) - num_others
        return min(in_graph, -(-num_tokens // self.queries) * self.queries)

    def edges(self, num_tokens: int, num_others: int) -> Iterator[int]:
        """Yields the largest numbers of a prompt's tokens, up to num_tokens, that fill a graph and tiles of queries."""
        fitting = bisect_right(self.graph_sizes, num_others + num_tokens)
        if fitting > 0:
            yield max(0, self.graph_sizes[fitting - 1] - num_others)
        yield num_tokens - num_tokens % self.queries
