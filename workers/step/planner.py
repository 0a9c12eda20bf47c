"""Converts the scheduler's chunks to a StepPlan: everything that the ranks need to know of them, in rows of numbers."""

# T tokens of the step · F fields of a token · C chunks · B decodes

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import compress
from operator import add

import numpy as np

from lorafleet.kernels.lora.lora_batch import BASE_SLOT
from lorafleet.kernels.recurrent.recurrent_batch import NOT_KEPT
from lorafleet.workers.attention.attention_backend import AttentionBatch
from lorafleet.workers.device.step_plan import FIELDS, POSITION, SOURCE, Rows, StepPlan
from lorafleet.workers.schedule.sequence import UNKNOWN, Chunk, Sequence
from lorafleet.workers.step.decode_columns import NEW, DecodeColumns, TokensBefore, no_decodes

Column = np.ndarray[tuple[int], np.dtype[np.int64]]  # a number of each chunk

SCORED_ROWS = 128  # rows of logits that are computed at once for prompt logprobs; kv_cache_sizing.py reserves memory


@dataclass(frozen=True, slots=True)
class ScoredSpan:
    """Rows of a step, from first_row on, that predict these tokens of one chunk's prompt."""

    chunk: int
    first_row: int
    tokens: list[int]


def plan_step(
    chunks: list[Chunk],
    before: TokensBefore,
    first_known: int,
    block_size: int,
    slot_ranks: list[int],
    last: DecodeColumns | None = None,
) -> StepPlan:
    """Returns the plan of one step.

    Args:
        first_known: Index in the pool of tokens where those that the host knows begin, see StepInputs.
        last: The decodes of the last plan. None stands for none.
    """
    last = last or no_decodes()
    places_C = last.find(chunks)
    num_decodes = len(chunks) if places_C is None else _num_decodes(chunks, places_C)
    others = chunks[num_decodes:]
    decodes = _decodes(chunks[:num_decodes], places_C, last, before, first_known, block_size)
    query_lens = [chunk.num_tokens for chunk in others]
    start_C = [chunk.sequence.num_computed + chunk.sequence.num_unverified for chunk in others]
    samples = [chunk.samples for chunk in others]
    base_lens = _base_lens([chunk.sequence for chunk in others], query_lens)
    has_states = chunks[0].sequence.state_slot is not None
    return StepPlan(
        fields_FT=_fields(decodes.fields_FB, others, before.row_by_request, first_known, block_size),
        attention=AttentionBatch(
            query_lens=[1] * num_decodes + query_lens,
            context_lens=(decodes.fields_FB[POSITION] + 1).tolist() + list(map(add, start_C, query_lens)),
            block_tables=[*decodes.tables, *_tables(others)] if others else decodes.tables,
        ),
        slots=decodes.slots + _slots([chunk.sequence for chunk in others], query_lens, base_lens),
        base_lens=decodes.base_lens + base_lens,
        sampling=_sampled_rows(num_decodes, others, samples),
        is_greedy=decodes.are_greedy and _are_greedy(compress(others, samples)),
        prompts=[(span.first_row, len(span.tokens)) for span in scored_spans(others, num_decodes)],
        slot_ranks=slot_ranks,
        num_decodes=num_decodes,
        num_plain=decodes.num_plain,
        state_slots=[chunk.sequence.state_slot for chunk in chunks if chunk.sequence.state_slot is not None]
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
        state_rings=[chunk.sequence.state_ring for chunk in chunks]
        if has_states and any(chunk.sequence.state_ring for chunk in chunks)
        else [],
    )


@dataclass(frozen=True, slots=True)
class _Decodes:
    """A part of a plan: the decodes at its front."""

    fields_FB: Rows
    tables: Many[Many[int]]
    slots: list[int]
    base_lens: list[int]
    are_greedy: bool
    num_plain: int


def _num_decodes(chunks: Many[Chunk], places_C: Column) -> int:
    """Returns how many chunks at the front have one token, behind which the next one is sampled."""
    for i in np.flatnonzero(places_C == NEW).tolist():
        chunk, sequence = chunks[i], chunks[i].sequence
        if chunk.num_tokens > 1 or len(sequence.tokens) - sequence.num_computed - sequence.num_unverified > 1:
            return i
    return len(chunks)


def _decodes(
    chunks: list[Chunk],
    places_C: Column | None,
    last: DecodeColumns,
    before: TokensBefore,
    first_known: int,
    block_size: int,
) -> _Decodes:
    """Plans the decodes at the front of a step. Only those that the last plan did not have take more than a few
    operations on arrays."""
    count = len(chunks)
    source_B = np.arange(first_known, first_known + count)
    if places_C is None:
        advanced_FB = last.advanced(chunks, None, source_B, before, block_size)
        return _Decodes(advanced_FB, last.tables, last.slots, [0] * count, last.are_greedy, last.num_plain)
    places_B = places_C[:count]
    new, known_B = np.flatnonzero(places_B == NEW).tolist(), np.flatnonzero(places_B != NEW)
    fresh = [chunks[i] for i in new]
    base_lens = _base_lens([chunk.sequence for chunk in fresh], [1] * len(new))
    slots = _slots([chunk.sequence for chunk in fresh], [1] * len(new), base_lens)
    fresh_FB = _fresh_decodes([chunk.sequence for chunk in fresh], source_B[new], before.row_by_request, block_size)
    are_greedy = _are_greedy(fresh if last.are_greedy else chunks)
    places = new if last.num_plain == len(last.chunks) else range(count)
    num_plain = next((i for i in places if not chunks[i].sequence.is_plain), count)
    if not len(known_B):
        return _Decodes(fresh_FB, _tables(fresh), slots, base_lens, are_greedy, num_plain)
    fields_FB: Rows = np.empty((FIELDS, count), np.int64)
    known = chunks if not new else [chunks[i] for i in known_B.tolist()]
    fields_FB[:, known_B] = last.advanced(known, places_B[known_B], source_B[known_B], before, block_size)
    fields_FB[:, new] = fresh_FB
    # NEW, which is -1, stands for the last entry here, until the chunk's own takes its place.
    last_places = places_B.tolist()
    all_tables, all_slots = [last.tables[i] for i in last_places], [last.slots[i] for i in last_places]
    all_base_lens = [0] * count
    for i, table, slot, base_len in zip(new, _tables(fresh), slots, base_lens, strict=True):
        all_tables[i], all_slots[i], all_base_lens[i] = table, slot, base_len
    return _Decodes(fields_FB, all_tables, all_slots, all_base_lens, are_greedy, num_plain)


def _tables(chunks: Many[Chunk]) -> list[Many[int]]:
    return [chunk.sequence.blocks.table for chunk in chunks if chunk.sequence.blocks is not None]


def _are_greedy(chunks: Iterable[Chunk]) -> bool:
    return all(chunk.sequence.takes_best for chunk in chunks)


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


def scored_spans(chunks: Many[Chunk], num_decodes: int = 0) -> list[ScoredSpan]:
    """Returns the prompt tokens whose logprobs are requested, in spans whose logits fit into memory beside everything
    else.

    Args:
        chunks: Those behind the first num_decodes chunks of a step, which have one token each and no such requests.
    """
    spans: list[ScoredSpan] = []
    first_row = num_decodes
    for i, chunk in enumerate(chunks, num_decodes):
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
    decoded_FB: Rows, others: Many[Chunk], row_by_request: Mapping[str, int], first_known: int, size: int
) -> Rows:
    """Returns the columns of a step, whose first ones are decoded_FB."""
    if not others:
        return decoded_FB
    first = decoded_FB.shape[1]  # the chunk's first column
    num_tokens = first + sum([chunk.num_tokens for chunk in others])
    rows_FT: Rows = np.empty((FIELDS, num_tokens), np.int64)
    rows_FT[SOURCE] = np.arange(first_known, first_known + num_tokens)
    rows_FT[:, :first] = decoded_FB
    drafted: list[tuple[int, Chunk]] = []
    for chunk in others:
        if chunk.drafts:
            drafted.append((first, chunk))
        else:
            _fill_prompt(rows_FT[:, first : first + chunk.num_tokens], chunk, row_by_request, size)
        first += chunk.num_tokens
    if drafted:
        _fill_drafted(rows_FT, drafted, size)
    return rows_FT


def _fresh_decodes(sequences: Many[Sequence], source_B: Column, row_by_request: Mapping[str, int], size: int) -> Rows:
    """Returns the columns of decodes that the last plan did not have. `source_B` is that of tokens that the host
    knows."""
    rows_FB: Rows = np.empty((FIELDS, len(sequences)), np.int64)
    token_B, _, position_B, rope_length_B, kv_slot_B = rows_FB
    rows_FB[SOURCE] = source_B
    token_B[:] = [sequence.tokens[-1] for sequence in sequences]
    for i in np.flatnonzero(token_B == UNKNOWN).tolist():
        rows_FB[SOURCE, i] = row_by_request[sequences[i].request_id]
    position_B[:] = [sequence.num_computed + sequence.num_unverified for sequence in sequences]
    rope_length_B[:] = [sequence.num_rotated for sequence in sequences]
    np.maximum(rope_length_B, position_B + 1, out=rope_length_B)
    places = zip(sequences, (position_B // size).tolist(), strict=True)
    kv_slot_B[:] = [sequence.blocks.table[i] for sequence, i in places if sequence.blocks is not None]
    kv_slot_B *= size
    kv_slot_B += position_B % size
    return rows_FB


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
