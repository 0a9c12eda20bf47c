"""Converts the scheduler's chunks to a StepPlan: everything that the ranks need to know of them, in rows of numbers."""

# T tokens of the step · F fields of a token

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import compress

import numpy as np

from lorafleet.kernels.lora.lora_batch import BASE_SLOT
from lorafleet.kernels.recurrent.recurrent_batch import NOT_KEPT
from lorafleet.workers.attention.attention_backend import AttentionBatch
from lorafleet.workers.device.step_plan import FIELDS, Rows, StepPlan
from lorafleet.workers.schedule.sequence import UNKNOWN, Chunk, Sequence

Column = np.ndarray[tuple[int], np.dtype[np.int64]]  # a number of each chunk

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
        row_by_request: Row of each request that the last step sampled for, if the host has not read its token yet. If
            that step has verified drafts of the request, the token is another one, see unread_plan.py.
        first_known: Index in the pool of tokens where those that the host knows begin, see StepInputs.
    """
    sequences, query_lens = [chunk.sequence for chunk in chunks], [chunk.num_tokens for chunk in chunks]
    start_C = np.array([sequence.num_computed + sequence.num_unverified for sequence in sequences])
    num_decodes = _num_decodes(sequences, start_C, query_lens)
    others = chunks[num_decodes:]
    samples = [chunk.samples for chunk in others]
    sampling = sequences[:num_decodes] + list(compress(sequences[num_decodes:], samples))
    base_lens = _base_lens(sequences, query_lens)
    has_states = sequences[0].state_slot is not None
    return StepPlan(
        fields_FT=_fields(sequences[:num_decodes], others, start_C, row_by_request, first_known, block_size),
        attention=AttentionBatch(
            query_lens=query_lens,
            context_lens=(start_C + query_lens).tolist(),
            block_tables=[sequence.blocks.table for sequence in sequences if sequence.blocks is not None],
        ),
        slots=_slots(sequences, query_lens, base_lens),
        base_lens=base_lens,
        sampling=_sampled_rows(num_decodes, others, samples),
        is_greedy=all(sequence.takes_best for sequence in sampling),
        prompts=[(span.first_row, len(span.tokens)) for span in scored_spans(chunks)],
        slot_ranks=slot_ranks,
        state_slots=[sequence.state_slot for sequence in sequences if sequence.state_slot is not None]
        if has_states
        else [],
        resumed_states=[
            (chunk.resumes_from, chunk.sequence.state_slot)
            for chunk in chunks
            if chunk.resumes_from is not None and chunk.sequence.state_slot is not None
        ]
        if has_states
        else [],
        state_snapshots=[
            (_slot_behind_own(chunk.sequence), chunk.snapshot) for chunk in chunks if chunk.snapshot is not None
        ]
        if has_states
        else [],
        kept_states=_kept_states(chunks) if has_states else [],
        state_rings=[sequence.state_ring for sequence in sequences]
        if has_states and any(sequence.state_ring for sequence in sequences)
        else [],
    )


def _num_decodes(sequences: Many[Sequence], start_C: Column, query_lens: list[int]) -> int:
    """Returns how many chunks at the front have one token, behind which the next one is sampled."""
    len_C = np.array([len(sequence.tokens) for sequence in sequences])
    is_other_C = (len_C - start_C > 1) | (np.array(query_lens) > 1)
    return int(is_other_C.argmax()) if is_other_C.any() else len(sequences)


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


def _sampled_rows(num_decodes: int, others: Many[Chunk], samples: list[bool]) -> list[int]:
    """Returns the rows of each chunk's last own token and of its drafts, if it samples. The others come behind the
    decodes."""
    rows, end = list(range(num_decodes)), num_decodes
    for chunk, is_sampled in zip(others, samples, strict=True):
        end += chunk.num_tokens
        if is_sampled:
            rows += range(end - 1 - len(chunk.drafts), end)
    return rows


def _base_lens(sequences: Many[Sequence], query_lens: list[int]) -> list[int]:
    """Returns how many tokens each sequence computes in the step before its adapter begins to work."""
    if not any(sequence.first_adapted for sequence in sequences):
        return [0] * len(sequences)
    return [
        min(max(sequence.first_adapted - sequence.num_computed, 0), count)
        for sequence, count in zip(sequences, query_lens, strict=True)
    ]


def _slots(sequences: Many[Sequence], query_lens: list[int], base_lens: list[int]) -> list[int]:
    return [
        BASE_SLOT if sequence.slot is None or num_base == count else sequence.slot
        for sequence, count, num_base in zip(sequences, query_lens, base_lens, strict=True)
    ]


def scored_spans(chunks: Many[Chunk]) -> list[ScoredSpan]:
    """Returns the prompt tokens whose logprobs are requested, in spans whose logits fit into memory beside everything
    else."""
    spans: list[ScoredSpan] = []
    first_row = 0
    for i, chunk in enumerate(chunks if any(c.sequence.prompt_logprobs is not None for c in chunks) else ()):
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


def _fields(
    decodes: Many[Sequence],
    others: Many[Chunk],
    start_C: Column,
    row_by_request: Mapping[str, int],
    first_known: int,
    size: int,
) -> Rows:
    num_tokens = len(decodes) + sum([chunk.num_tokens for chunk in others])
    rows_FT: Rows = np.empty((FIELDS, num_tokens), np.int64)
    rows_FT[1] = np.arange(first_known, first_known + num_tokens)
    if decodes:
        _fill_decodes(rows_FT[:, : len(decodes)], decodes, start_C[: len(decodes)], row_by_request, size)
    drafted: list[tuple[int, Chunk]] = []
    first = len(decodes)  # the chunk's first column
    for chunk in others:
        if chunk.drafts:
            drafted.append((first, chunk))
        else:
            _fill_prompt(rows_FT[:, first : first + chunk.num_tokens], chunk, row_by_request, size)
        first += chunk.num_tokens
    if drafted:
        _fill_drafted(rows_FT, drafted, size)
    return rows_FT


def _fill_decodes(
    rows_FB: Rows, decodes: Many[Sequence], start_B: Column, row_by_request: Mapping[str, int], size: int
) -> None:
    """Fills the columns of decodes, which are nearly all of many steps: with a few operations for each."""
    token_B, source_B, position_B, rope_length_B, kv_slot_B = rows_FB
    token_B[:] = [sequence.tokens[-1] for sequence in decodes]
    for i in np.flatnonzero(token_B == UNKNOWN).tolist():
        source_B[i] = row_by_request[decodes[i].request_id]
    position_B[:] = start_B
    np.maximum([sequence.num_rotated for sequence in decodes], start_B + 1, out=rope_length_B)
    places = zip(decodes, (start_B // size).tolist(), strict=True)
    kv_slot_B[:] = [sequence.blocks.table[i] for sequence, i in places if sequence.blocks is not None]
    kv_slot_B *= size
    kv_slot_B += start_B % size


def _fill_prompt(rows_FT: Rows, chunk: Chunk, row_by_request: Mapping[str, int], size: int) -> None:
    """Fills the columns of a chunk without drafts. The sources are those of known tokens before."""
    token_T, source_T, position_T, rope_length_T, kv_slot_T = rows_FT
    sequence = chunk.sequence
    assert sequence.blocks is not None
    start, end = sequence.num_computed, sequence.num_computed + chunk.num_tokens
    token_T[:] = sequence.tokens[start:end]
    if token_T[-1] == UNKNOWN:
        source_T[-1] = row_by_request[sequence.request_id]
    position_T[:] = np.arange(start, end)
    np.maximum(position_T + 1, sequence.num_rotated, out=rope_length_T)
    kv_slot_T[:] = np.asarray(sequence.blocks.table)[position_T // size] * size + position_T % size


def _fill_drafted(rows_FT: Rows, drafted: Many[tuple[int, Chunk]], size: int) -> None:
    """Fills the columns of sequences with drafts but their sources. The host knows all of their tokens, or none.

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
        start, count = seq.num_computed + seq.num_unverified, chunk.num_tokens
        first_block = start // size
        spans.append((first, start, count, seq.num_rotated, len(blocks) - first_block))
        blocks += seq.blocks.table[first_block : (start + count - 1) // size + 1]
        tokens += seq.tokens[seq.num_computed :]
        tokens += chunk.drafts
    counts = np.array([span[2] for span in spans])
    first_T, start_T, _, longest_T, block_T = np.array(spans).repeat(counts, axis=0).T
    place_T = np.arange(len(tokens)) - (counts.cumsum() - counts).repeat(counts)
    position_T, column_T = start_T + place_T, first_T + place_T
    rows_FT[0, column_T] = tokens
    rows_FT[2, column_T] = position_T
    rows_FT[3, column_T] = np.maximum(longest_T, position_T + 1)
    rows_FT[4, column_T] = np.array(blocks)[block_T + position_T // size] * size + position_T % size
