"""What a step computes, for every rank that computes it: rows of numbers, without requests, parameters or texts.

The rank that schedules makes it of the scheduler's chunks; the others get it by message (workers/tp/).
"""

# T tokens of the step · F fields of a token · B sequences

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from lorafleet.kernels.lora_batch import BASE_SLOT
from lorafleet.workers.attention.base import AttentionBatch
from lorafleet.workers.scheduler import Chunk
from lorafleet.workers.sequence import UNKNOWN

FIELDS = 4  # token, source, position, KV slot
Rows = np.ndarray[tuple[int, int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """fields_FT: as StepInputs has them. slots: of each sequence, or BASE_SLOT. sampling: the rows of the step whose
    next token is chosen. is_greedy: all of these tokens are the largest logits' and nobody wants to see logits.
    prompts: (first row, count) of those that predict prompt tokens, where asked for. rope_lengths: of each token, where
    the model's rotation depends on them. slot_ranks: LoRAModelManager.ranks, of every slot.
    """

    fields_FT: Rows
    attention: AttentionBatch
    slots: list[int]
    sampling: list[int]
    is_greedy: bool
    prompts: list[tuple[int, int]]
    rope_lengths: list[int] | None
    slot_ranks: list[int]

    @property
    def num_tokens(self) -> int:
        return self.fields_FT.shape[1]

    @property
    def is_decode(self) -> bool:
        """Every sequence computes one token and wants the next."""
        return len(self.sampling) == len(self.slots) == self.num_tokens and not self.prompts

    @property
    def lora_slots(self) -> list[int]:
        """Of each token, or BASE_SLOT."""
        slots: list[int] = []
        for slot, count in zip(self.slots, self.attention.query_lens, strict=True):
            slots += [slot] * count
        return slots


def plan_step(
    chunks: Sequence[Chunk],
    row_of: Mapping[str, int],
    first_known: int,
    block_size: int,
    needs_rope_lengths: bool,
    slot_ranks: list[int],
) -> StepPlan:
    """row_of: of each request that the last step sampled for, where the host has not read its token yet.
    first_known: the first place in the pool of tokens that the host knows, see StepInputs."""
    ends = list(accumulate(chunk.num_tokens for chunk in chunks))
    sampling = [chunk.sequence for chunk in chunks if chunk.samples]
    return StepPlan(
        fields_FT=_fields(chunks, row_of, first_known, block_size),
        attention=AttentionBatch(
            query_lens=[chunk.num_tokens for chunk in chunks],
            context_lens=[chunk.sequence.num_computed + chunk.num_tokens for chunk in chunks],
            block_tables=[chunk.sequence.blocks.table for chunk in chunks if chunk.sequence.blocks is not None],
        ),
        slots=[BASE_SLOT if chunk.sequence.slot is None else chunk.sequence.slot for chunk in chunks],
        sampling=[end - 1 for end, chunk in zip(ends, chunks, strict=True) if chunk.samples],
        is_greedy=all(
            seq.params.greedy and not seq.params.edits_logits and seq.params.logprobs is None for seq in sampling
        ),
        prompts=[
            (end - chunk.num_tokens, len(predicted))
            for end, chunk in zip(ends, chunks, strict=True)
            if (predicted := predicted_tokens(chunk))
        ],
        rope_lengths=_rope_lengths(chunks) if needs_rope_lengths else None,
        slot_ranks=slot_ranks,
    )


def predicted_tokens(chunk: Chunk) -> list[int]:
    """The prompt tokens that the chunk's tokens predict, where their logprobs are asked for.

    The token at position p predicts the one at p + 1; the last one predicts the answer.
    """
    seq = chunk.sequence
    if not seq.wants_prompt_logprobs:
        return []
    after = seq.tokens[seq.num_computed + 1 : seq.num_computed + chunk.num_tokens + 1]
    return after[: seq.num_prompt - seq.num_computed - 1]


def _rope_lengths(chunks: Sequence[Chunk]) -> list[int]:
    """Of each token, see RotaryEmbedding.cos_sin."""
    starts = [(chunk.sequence, chunk.sequence.num_computed, chunk.num_tokens) for chunk in chunks]
    return [max(seq.num_prompt, at + 1) for seq, start, count in starts for at in range(start, start + count)]


def _fields(chunks: Sequence[Chunk], row_of: Mapping[str, int], first_known: int, size: int) -> Rows:
    num_tokens = sum(chunk.num_tokens for chunk in chunks)
    rows_FT: Rows = np.empty((FIELDS, num_tokens), np.int64)
    token_T, source_T, position_T, kv_slot_T = rows_FT
    source_T[:] = np.arange(first_known, first_known + num_tokens)
    singles: list[tuple[int, int, int, int, int]] = []
    at = 0
    for chunk in chunks:
        seq = chunk.sequence
        assert seq.blocks is not None
        start, end, table = seq.num_computed, seq.num_computed + chunk.num_tokens, seq.blocks.table
        last = seq.tokens[end - 1]
        source = row_of[seq.request_id] if last == UNKNOWN else first_known + at + chunk.num_tokens - 1
        if chunk.num_tokens == 1:  # nearly all chunks; numpy would take several times as long for each
            singles.append((at, last, source, start, table[start // size] * size + start % size))
        else:
            span = slice(at, at + chunk.num_tokens)
            positions = np.arange(start, end)
            token_T[span] = seq.tokens[start:end]
            source_T[at + chunk.num_tokens - 1] = source
            position_T[span] = positions
            kv_slot_T[span] = np.asarray(table)[positions // size] * size + positions % size
        at += chunk.num_tokens
    if singles:
        where, *fields = np.array(singles).T
        rows_FT[:, where] = fields
    return rows_FT
