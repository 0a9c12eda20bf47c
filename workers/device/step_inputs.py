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
    """

    def __init__(self, most_sampled: int, max_tokens: int, trash_slot: int, device: torch.device) -> None:
        self.first_known = most_sampled  # the first index in the pool behind the last step's samples
        self._trash_slot = trash_slot
        self._device_block = torch.zeros(most_sampled + FIELDS * max_tokens, dtype=torch.int64, device=device)
        self._host = torch.zeros(FIELDS * max_tokens, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self.sampled_B = self._device_block[:most_sampled]

    def tensors(self, num_tokens: int) -> InputTensors:
        start = self.first_known
        ends = [start + num_tokens * field for field in range(FIELDS + 1)]
        behind = [self._device_block[begin:end] for begin, end in pairwise(ends[1:])]
        return InputTensors(self._device_block[: ends[1]], *behind)

    def upload(self, fields_FT: Rows, num_tokens: int) -> None:
        """Copies the fields to the device and fills the padding. `num_tokens` includes the padding."""
        if self._copied is not None:
            self._copied.synchronize()
        host = self._host[: FIELDS * num_tokens]
        rows_FT, used = host.view(FIELDS, num_tokens).numpy(), fields_FT.shape[1]
        rows_FT[:, :used] = fields_FT
        token_T, source_T, position_T, rope_length_T, kv_slot_T = rows_FT[:, used:]
        token_T[:] = 0
        source_T[:] = np.arange(self.first_known + used, self.first_known + num_tokens)
        position_T[:] = 0
        rope_length_T[:] = 1
        kv_slot_T[:] = self._trash_slot
        start = self.first_known
        self._device_block[start : start + len(host)].copy_(host, non_blocking=True)

    def mark_copied(self) -> None:
        """Records that a step's copies out of pinned memory are queued, including those of the attention plan.

        The next step's upload() waits for them before any of that memory is written again. They are usually long done
        by then.
        """
        if self._copied is not None:
            self._copied.record()

    def fill_with_padding(self, num_tokens: int) -> None:
        self.upload(np.empty((FIELDS, 0), np.int64), num_tokens)
