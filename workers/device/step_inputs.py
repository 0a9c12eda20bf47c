"""Holds what a step reads besides weights and cache: tokens, positions, and where keys and values are written.

It is one block of device memory that never moves, so that captured graphs can read it. One copy per step fills it. The
tokens that the last step sampled are in it too. A step that is launched before the host knows them reads them there.
"""

# T tokens of a step · B rows that sampled · F fields of a token

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from lorafleet.workers.device.step_plan import FIELDS, Rows
from lorafleet.workers.device.unread_inputs import Corrections, UnreadInputs


@dataclass(frozen=True, slots=True)
class InputTensors:
    """Views of the block for a step of T tokens, all int64."""

    pool: Tensor  # the last step's samples, then the tokens that the host knows
    source_T: Tensor  # each token's index in the pool
    position_T: Tensor
    rope_length_T: Tensor  # as RotaryEmbedding.cos_sin takes it
    kv_slot_T: Tensor  # block * block size + offset, where the token's key and value are written

    def tokens(self) -> Tensor:
        """Returns the tokens, int64 [T]."""
        return self.pool[self.source_T]


class StepInputs:
    """The inputs of all steps.

    Args:
        most_sampled: Largest number of tokens that a step chooses.
        trash_slot: A KV slot that no sequence is ever given, for the padding of captured steps.
        most_queued: Largest number of steps whose inputs wait for the device to copy them.
    """

    def __init__(
        self, most_sampled: int, max_tokens: int, trash_slot: int, device: torch.device, most_queued: int = 1
    ) -> None:
        self.first_known = most_sampled  # the first index in the pool behind the last step's samples
        self._trash_slot = trash_slot
        # The whole block. Whoever computes a step while another one is in flight restores it.
        self.block = torch.zeros(most_sampled + FIELDS * max_tokens, dtype=torch.int64, device=device)
        is_cuda = device.type == "cuda"
        self._hosts = [
            torch.zeros(FIELDS * max_tokens, dtype=torch.int64, pin_memory=is_cuda) for _ in range(most_queued)
        ]
        self._copied = [torch.cuda.Event() for _ in range(most_queued)] if is_cuda else []
        self._turn = 0  # Index of the pinned memory that the last upload() filled.
        self.sampled_B = self.block[:most_sampled]

    def tensors(self, num_tokens: int) -> InputTensors:
        start = self.first_known
        ends = [start + num_tokens * field for field in range(FIELDS + 1)]
        behind = [self.block[begin:end] for begin, end in pairwise(ends[1:])]
        return InputTensors(self.block[: ends[1]], *behind)

    def upload(self, fields_FT: Rows, num_tokens: int) -> None:
        """Copies the fields to the device and fills the padding. `num_tokens` includes the padding."""
        self._turn = (self._turn + 1) % len(self._hosts)
        if self._copied:
            self._copied[self._turn].synchronize()
        host = self._hosts[self._turn][: FIELDS * num_tokens]
        rows_FT, used = host.view(FIELDS, num_tokens).numpy(), fields_FT.shape[1]
        rows_FT[:, :used] = fields_FT
        token_T, source_T, position_T, rope_length_T, kv_slot_T = rows_FT[:, used:]
        token_T[:] = 0
        source_T[:] = np.arange(self.first_known + used, self.first_known + num_tokens)
        position_T[:] = 0
        rope_length_T[:] = 1
        kv_slot_T[:] = self._trash_slot
        start = self.first_known
        self.block[start : start + len(host)].copy_(host, non_blocking=True)

    def correct(self, unread: UnreadInputs, corrections: Corrections | None, num_tokens: int) -> None:
        """Queues the correction of inputs that were uploaded. `num_tokens` includes the padding. There are corrections
        if sequences may be shorter than planned. Tokens that the host does not know yet are left to fill_in()."""
        inputs = self.tensors(num_tokens)
        inputs.source_T.index_copy_(0, unread.row_N, self.first_known + unread.row_N)
        if unread.token_N is not None:
            self.fill_in(unread)
        if unread.short_B is None or corrections is None:
            return
        short_T = unread.short_B[corrections.sequence_T]
        used = len(short_T)
        inputs.position_T[:used] -= short_T
        inputs.rope_length_T[:used] -= short_T
        inputs.kv_slot_T[:used] = corrections.kv_slot_TK.gather(1, short_T[:, None]).squeeze(1)

    def fill_in(self, unread: UnreadInputs) -> None:
        """Queues the copy of the tokens to the places that correct() has made for them."""
        assert unread.token_N is not None
        self.block.index_copy_(0, self.first_known + unread.row_N, unread.token_N)

    def known_tokens(self, num_tokens: int) -> Tensor:
        """Returns a view of the tokens that the host knew, or correct() has filled in, int64 [T]."""
        return self.block[self.first_known : self.first_known + num_tokens]

    def mark_copied(self) -> None:
        """Records that a step's copies out of pinned memory are queued, including those of the attention plan.

        A later upload() waits for them before any of that memory is written again. They are usually long done by then.
        """
        if self._copied:
            self._copied[self._turn].record()

    def fill_with_padding(self, num_tokens: int) -> None:
        self.upload(np.empty((FIELDS, 0), np.int64), num_tokens)
