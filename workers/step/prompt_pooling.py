"""Computes embeddings of prompts, and the outputs of adapters' classification heads, from a step's hidden states.

A prompt may end many steps after it began. Until then, its sequence holds what its chunks have added so far.
"""

# T tokens of the step · D hidden size · L labels · N prompts that end in the step under one head

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many

import torch
from torch import Tensor

from lorafleet.protocol.errors import InvalidRequest
from lorafleet.protocol.messages import HEADS
from lorafleet.workers.device.host_copy import Download, to_device
from lorafleet.workers.schedule.sequence import Chunk, Sequence
from lorafleet.workers.slots.classifier_extras import SlotClassifier

Pooled = dict[int, list[Tensor]]  # parts of a prompt's values on the host, by its chunk's index
Faults = list[tuple[Sequence, Exception]]


def pool_prompts(
    chunks: Many[Chunk], hidden_TD: Tensor, classifier_of: Callable[[int], SlotClassifier | None], download: Download
) -> tuple[Pooled, Faults]:
    """Queues the pooling of a step.

    Args:
        hidden_TD: the hidden states after the last norm, the chunks' tokens one after another.
        classifier_of: returns the classification head of a slot's adapter, or None if it has none.

    Returns the values of the prompts that end in the step, float32, once `download` is done, and the sequences that
    cannot go on.
    """
    pooled: Pooled = {}
    faults: Faults = []
    ends: dict[int, list[tuple[int, int]]] = {}  # by slot: chunk and row of each prompt's last token
    start = 0
    for i, chunk in enumerate(chunks):
        sequence, end = chunk.sequence, start + chunk.num_tokens
        if sequence.pooling in HEADS:
            head = None if sequence.slot is None else classifier_of(sequence.slot)
            if head is None or sequence.slot is None:
                faults.append((sequence, InvalidRequest("the model has no classification head.", "model")))
            elif sequence.pooling == "token_classify":
                _add(sequence, download.add(head.logits(hidden_TD[start:end])))
                if chunk.samples:
                    pooled[i] = sequence.pooled
            elif chunk.samples:
                ends.setdefault(sequence.slot, []).append((i, end - 1))
        elif sequence.pooling is not None:
            vector_D = _embed(chunk, hidden_TD[start:end])
            if vector_D is not None:
                pooled[i] = [download.add(vector_D)]
        start = end
    for slot, rows in ends.items():
        head = classifier_of(slot)
        assert head is not None
        row_N = to_device([row for _, row in rows], torch.int64, hidden_TD.device)
        logits_NL = download.add(head.logits(hidden_TD[row_N]))
        pooled |= {i: [logits_L] for (i, _), logits_L in zip(rows, logits_NL, strict=True)}
    return pooled, faults


def _embed(chunk: Chunk, hidden_TD: Tensor) -> Tensor | None:
    """Returns the embedding [D] if the prompt ends with the chunk, whose hidden states are given."""
    sequence = chunk.sequence
    if sequence.pooling == "last":
        return hidden_TD[-1].float() if chunk.samples else None
    begins = sequence.num_computed == 0
    if sequence.pooling == "cls":
        if begins:  # a copy, since the next step may overwrite the hidden states
            sequence.pooled = [hidden_TD[0].to(torch.float32, copy=True)]
        return sequence.pooled[0] if chunk.samples else None
    sum_D = hidden_TD.float().sum(dim=0)
    if not begins:
        sum_D += sequence.pooled[0]
    sequence.pooled = [sum_D]
    return sum_D / sequence.num_prompt if chunk.samples else None


def _add(sequence: Sequence, part: Tensor) -> None:
    """Adds a part of the values to the sequence.

    A sequence that begins again gets a new list, since a step in flight may refer to the old one.
    """
    sequence.pooled = [part] if sequence.num_computed == 0 else [*sequence.pooled, part]
