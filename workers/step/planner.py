"""Converts the scheduler's chunks to a StepPlan: everything that the ranks need to know of them, in rows of numbers."""

# T tokens of the step · F fields of a token

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from lorafleet.kernels.lora.lora_batch import BASE_SLOT
from lorafleet.kernels.recurrent.recurrent_batch import NOT_KEPT
from lorafleet.workers.attention.attention_backend import AttentionBatch
from lorafleet.workers.device.step_plan import FIELDS, Rows, StepPlan
from lorafleet.workers.schedule.sequence import UNKNOWN, Chunk, Sequence

SCORED_ROWS = 128  # rows of logits that are computed at once for prompt logprobs; kv_cache_sizing.py reserves memory


@dataclass(frozen=True, slots=True)
class ScoredSpan:
    """Rows of a step, from first_row on, that predict these tokens of one chunk's prompt."""

    chunk: int
    first_row: int
    tokens: list[int]


def plan_step(
    chunks: Many[Chunk],
    row_by_request: Mapping[str, int],
    first_known: int,
    block_size: int,
    slot_ranks: list[int],
) -> StepPlan:
    """Returns the plan of one step.

    Args:
        row_by_request: Row of each request that the last step sampled for, if the host has not read its token yet.
        first_known: Index in the pool of tokens where those that the host knows begin, see StepInputs.
    """
    ends = list(accumulate(chunk.num_tokens for chunk in chunks))
    samples = [chunk.samples for chunk in chunks]
    sampling = [chunk.sequence for chunk, is_sampled in zip(chunks, samples, strict=True) if is_sampled]
    return StepPlan(
        fields_FT=_fields(chunks, row_by_request, first_known, block_size),
        attention=AttentionBatch(
            query_lens=[chunk.num_tokens for chunk in chunks],
            context_lens=[chunk.sequence.num_computed + chunk.num_tokens for chunk in chunks],
            block_tables=[chunk.sequence.blocks.table for chunk in chunks if chunk.sequence.blocks is not None],
        ),
        slots=[_slot(chunk) for chunk in chunks],
        base_lens=[_num_base(chunk) for chunk in chunks],
        sampling=_sampled_rows(chunks, samples, ends),
        is_greedy=all(
            seq.params.greedy
            and not seq.params.edits_logits
            and seq.params.logprobs is None
            and seq.params.structured_outputs is None
            for seq in sampling
        ),
        prompts=[(span.first_row, len(span.tokens)) for span in scored_spans(chunks)],
        slot_ranks=slot_ranks,
        state_slots=[chunk.sequence.state_slot for chunk in chunks if chunk.sequence.state_slot is not None],
        resumed_states=[
            (chunk.resumes_from, chunk.sequence.state_slot)
            for chunk in chunks
            if chunk.resumes_from is not None and chunk.sequence.state_slot is not None
        ],
        state_snapshots=[
            (_slot_behind_own(chunk.sequence), chunk.snapshot) for chunk in chunks if chunk.snapshot is not None
        ],
        kept_states=_kept_states(chunks),
    )


def _slot_behind_own(sequence: Sequence) -> int:
    """Returns the slot of the state behind the sequence's own tokens in the step. Drafts may follow these."""
    assert sequence.state_slot is not None
    return sequence.draft_slots[0] if sequence.draft_slots else sequence.state_slot


def _kept_states(chunks: Many[Chunk]) -> list[int]:
    """Returns the slot of each token for StepPlan.kept_states. The state behind a sequence's last draft is in the
    sequence's own slot."""
    if not any(chunk.sequence.draft_slots for chunk in chunks):
        return []
    kept: list[int] = []
    for chunk in chunks:
        slots = chunk.sequence.draft_slots
        assert len(slots) == len(chunk.drafts)
        kept += [NOT_KEPT] * (chunk.num_tokens - 1 - len(slots)) + slots + [NOT_KEPT]
    return kept


def _sampled_rows(chunks: Many[Chunk], samples: list[bool], ends: list[int]) -> list[int]:
    """Returns the rows of each chunk's last own token and of its drafts, if it samples. `ends` are the rows behind the
    chunks."""
    rows: list[int] = []
    for chunk, is_sampled, end in zip(chunks, samples, ends, strict=True):
        if not is_sampled:
            continue
        if chunk.drafts:
            rows += range(end - 1 - len(chunk.drafts), end)
        else:
            rows.append(end - 1)
    return rows


def _slot(chunk: Chunk) -> int:
    slot = chunk.sequence.slot
    return BASE_SLOT if slot is None or _num_base(chunk) == chunk.num_tokens else slot


def _num_base(chunk: Chunk) -> int:
    """Returns the number of the chunk's tokens before the sequence's adapter begins to work."""
    sequence = chunk.sequence
    return min(max(sequence.first_adapted - sequence.num_computed, 0), chunk.num_tokens)


def scored_spans(chunks: Many[Chunk]) -> list[ScoredSpan]:
    """Returns the prompt tokens whose logprobs are requested, in spans whose logits fit into memory beside everything
    else."""
    spans: list[ScoredSpan] = []
    first_row = 0
    for i, chunk in enumerate(chunks):
        tokens = _predicted_tokens(chunk)
        starts = range(0, len(tokens), SCORED_ROWS)
        spans += [ScoredSpan(i, first_row + start, tokens[start : start + SCORED_ROWS]) for start in starts]
        first_row += chunk.num_tokens
    return spans


def _predicted_tokens(chunk: Chunk) -> list[int]:
    """Returns the prompt tokens that the chunk's tokens predict, if their logprobs are requested.

    The token at position p predicts the one at p + 1. The last one predicts the answer.
    """
    seq = chunk.sequence
    if not seq.wants_prompt_logprobs:
        return []
    after = seq.tokens[seq.num_computed + 1 : seq.num_computed + chunk.num_tokens + 1]
    return after[: seq.num_prompt - seq.num_computed - 1]


def _fields(chunks: Many[Chunk], row_by_request: Mapping[str, int], first_known: int, size: int) -> Rows:
    num_tokens = sum(chunk.num_tokens for chunk in chunks)
    rows_FT: Rows = np.empty((FIELDS, num_tokens), np.int64)
    token_T, source_T, position_T, rope_length_T, kv_slot_T = rows_FT
    source_T[:] = np.arange(first_known, first_known + num_tokens)
    singles: list[tuple[int, ...]] = []
    drafted: list[tuple[int, Chunk]] = []
    first = 0  # the chunk's first column
    for chunk in chunks:
        seq = chunk.sequence
        assert seq.blocks is not None
        start, end, table = seq.num_computed, seq.num_computed + chunk.num_tokens, seq.blocks.table
        if chunk.drafts:
            drafted.append((first, chunk))
            first += chunk.num_tokens
            continue
        last = seq.tokens[end - 1]
        source = row_by_request[seq.request_id] if last == UNKNOWN else first_known + first + chunk.num_tokens - 1
        if chunk.num_tokens == 1:  # nearly all chunks; numpy calls would take several times as long for each
            length = max(seq.num_rotated, end)
            singles.append((first, last, source, start, length, table[start // size] * size + start % size))
        else:
            span = slice(first, first + chunk.num_tokens)
            positions = np.arange(start, end)
            token_T[span] = seq.tokens[start:end]
            source_T[first + chunk.num_tokens - 1] = source
            position_T[span] = positions
            rope_length_T[span] = np.maximum(positions + 1, seq.num_rotated)
            kv_slot_T[span] = np.asarray(table)[positions // size] * size + positions % size
        first += chunk.num_tokens
    if singles:
        columns, *fields = np.array(singles).T
        rows_FT[:, columns] = fields
    if drafted:
        _fill_drafted(rows_FT, drafted, size)
    return rows_FT


def _fill_drafted(rows_FT: Rows, drafted: Many[tuple[int, Chunk]], size: int) -> None:
    """Fills the columns of sequences with drafts but their sources. The host knows all of their tokens.

    Args:
        drafted: The first column of each chunk, and the chunk.
        size: Tokens of a KV block.
    """
    tokens: list[int] = []
    blocks: list[int] = []  # All that any of the tokens are in.
    spans: list[tuple[int, ...]] = []
    for first, chunk in drafted:
        seq = chunk.sequence
        assert seq.blocks is not None
        start, count = seq.num_computed, chunk.num_tokens
        first_block = start // size
        spans.append((first, start, count, seq.num_rotated, len(blocks) - first_block))
        blocks += seq.blocks.table[first_block : (start + count - 1) // size + 1]
        tokens += seq.tokens[start:]
        tokens += chunk.drafts
    counts = np.array([span[2] for span in spans])
    first_T, start_T, _, longest_T, block_T = np.array(spans).repeat(counts, axis=0).T
    place_T = np.arange(len(tokens)) - (counts.cumsum() - counts).repeat(counts)
    position_T, column_T = start_T + place_T, first_T + place_T
    rows_FT[0, column_T] = tokens
    rows_FT[2, column_T] = position_T
    rows_FT[3, column_T] = np.maximum(longest_T, position_T + 1)
    rows_FT[4, column_T] = np.array(blocks)[block_T + position_T // size] * size + position_T % size
