"""Ends work of idle time early when a request arrives, so that the request does not wait for it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lorafleet.workers.attention.attention_backend import AttentionBackend, AttentionBatch, DraftRows

IsInterrupted = Callable[[], bool]


class WorkInterrupted(Exception):
    """Work that was begun in idle time was given up, since something else arrived."""


def never() -> bool:
    """Lets work go on to its end."""
    return False


class InterruptibleAttention:
    """Passes all calls to a backend, and raises WorkInterrupted at the first layer's attention after something arrived.

    Every decoder calls its attention once a layer, so a forward ends early within one layer's launches. LoRA kernels on
    a side stream have been joined there, as a capture's end requires.
    """

    def __init__(self, attention: AttentionBackend, is_interrupted: IsInterrupted) -> None:
        self._attention = attention
        self._is_interrupted = is_interrupted

    def plan(self, batch: AttentionBatch) -> None:
        self._attention.plan(batch)

    def for_graph(self, num_seqs: int, max_context: int, drafts: DraftRows | None = None) -> AttentionBackend | None:
        return self._attention.for_graph(num_seqs, max_context, drafts)

    def attend(self, layer: int, q_THD: Tensor, out_THD: Tensor | None = None) -> Tensor:
        if self._is_interrupted():
            raise WorkInterrupted
        return self._attention.attend(layer, q_THD, out_THD)
