"""What a step reads besides weights and cache: tokens, positions, where keys and values go. One block of device memory
that never moves, so that captured graphs can read it, filled by one copy a step.

The tokens that the last step sampled are kept in it too: a step that is launched before the host knows them takes them
from there.
"""

# T tokens of a step · B rows that sampled · F fields of a token

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from lorafleet.workers.scheduler import Chunk
from lorafleet.workers.sequence import UNKNOWN

FIELDS = 4  # token, source, position, KV slot


@dataclass(frozen=True, slots=True)
class InputTensors:
    """Views for a step of T tokens, all int64. pool: the last step's samples, then the tokens that the host knows.

    source_T: each token's place in the pool. kv_slot_T: block * block size + offset, where its key and value go.
    """

    pool: Tensor
    source_T: Tensor
    position_T: Tensor
    kv_slot_T: Tensor

    def tokens(self) -> Tensor:
        """int64 [T]."""
        return self.pool[self.source_T]


class StepInputs:
    """trash_slot: a KV slot that no sequence is ever given, for the padding of captured steps."""

    def __init__(
        self, max_num_seqs: int, max_tokens: int, block_size: int, trash_slot: int, device: torch.device
    ) -> None:
        self._max_num_seqs = max_num_seqs
        self._block_size = block_size
        self._trash_slot = trash_slot
        self._device_block = torch.zeros(max_num_seqs + FIELDS * max_tokens, dtype=torch.int64, device=device)
        self._host = torch.zeros(FIELDS * max_tokens, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self.sampled_B = self._device_block[:max_num_seqs]

    def tensors(self, num_tokens: int) -> InputTensors:
        start = self._max_num_seqs
        ends = [start + num_tokens * field for field in range(FIELDS + 1)]
        source_T, position_T, kv_slot_T = (self._device_block[begin:end] for begin, end in pairwise(ends[1:]))
        return InputTensors(self._device_block[: ends[1]], source_T, position_T, kv_slot_T)

    def upload(self, chunks: Sequence[Chunk], row_of: Mapping[str, int], num_tokens: int) -> None:
        """row_of: in sampled_B, of each request that the last step sampled for. num_tokens: with the padding."""
        if self._copied is not None:
            self._copied.synchronize()
        host = self._host[: FIELDS * num_tokens]
        self._fill(host.view(FIELDS, num_tokens).numpy(), chunks, row_of)
        start = self._max_num_seqs
        self._device_block[start : start + len(host)].copy_(host, non_blocking=True)

    def mark_copied(self) -> None:
        """To be called once a step's copies out of pinned memory, the attention plan's too, are queued: the next
        step's upload() waits for them, which are long over as a rule, before any of that memory is written again."""
        if self._copied is not None:
            self._copied.record()

    def fill_with_padding(self, num_tokens: int) -> None:
        self.upload([], {}, num_tokens)

    def _fill(
        self,
        rows_FT: np.ndarray[tuple[int, int], np.dtype[np.int64]],
        chunks: Sequence[Chunk],
        row_of: Mapping[str, int],
    ) -> None:
        size, first_known = self._block_size, self._max_num_seqs
        token_T, source_T, position_T, kv_slot_T = rows_FT
        source_T[:] = np.arange(first_known, first_known + len(source_T))
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
        token_T[at:] = 0
        position_T[at:] = 0
        kv_slot_T[at:] = self._trash_slot
