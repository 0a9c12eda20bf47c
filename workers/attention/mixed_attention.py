"""Computes the layers of one model with several attention backends, each of which serves some of them.

A backend sees only its own layers, numbered from 0. Every backend plans every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from lorafleet.workers.attention.attention_backend import (
    AttentionBackend,
    AttentionBatch,
    DraftRows,
    ShortensSequences,
)


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """The backend that computes a layer, and its number there."""

    backend: int  # index of its backend
    layer: int  # index among that backend's layers


class MixedAttention:
    """Passes each layer's calls to its backend. `places` has an entry for each layer of the model."""

    def __init__(self, backends: Sequence[AttentionBackend], places: Sequence[LayerPlace]) -> None:
        self._backends = backends
        self._places = places

    def plan(self, batch: AttentionBatch) -> None:
        for backend in self._backends:
            backend.plan(batch)

    def for_graph(self, num_seqs: int, max_context: int, drafts: DraftRows | None = None) -> MixedAttention | None:
        captured = []
        for backend in self._backends:
            made = backend.for_graph(num_seqs, max_context, drafts)
            if made is None:
                return None
            captured.append(made)
        return MixedAttention(captured, self._places)

    def shorten(self, short_B: Tensor) -> None:
        for backend in self._backends:
            cast(ShortensSequences, backend).shorten(short_B)

    def attend(self, layer: int, q_THD: Tensor, out_THD: Tensor | None = None) -> Tensor:
        place = self._places[layer]
        return self._backends[place.backend].attend(place.layer, q_THD, out_THD)
