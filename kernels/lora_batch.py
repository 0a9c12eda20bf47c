"""Which adapter slot each token of one step uses, in the forms that the kernels read.

Built once a step on the host from plain Python lists, shared by every layer. Knows nothing of weights:
kernels/packed_lora.py has those.
"""

# T tokens in the step · M of them with an adapter · K tiles · N distinct slots in the step

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BASE_SLOT = -1  # in slot lists: this token uses the base model alone
TILE_TOKENS = 16  # tokens of one slot that one Triton program takes; 16 is tl.dot's least M


@dataclass(frozen=True, slots=True)
class LoRABatch:
    """Tokens grouped by slot. Host fields serve the torch twin, device fields the Triton kernels.

    slots: the distinct slots of the step, ascending. spans: for each, its [start, end) in order_M.
    order_M: int64, token indices sorted by slot, stable. active_T: int64, index into `slots`, N for base tokens.
    tiles_K3: int32 rows (slot, start in order_M, length <= TILE_TOKENS), in order.
    """

    num_tokens: int
    slots: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    order_M: Tensor
    active_T: Tensor
    tiles_K3: Tensor

    @classmethod
    def build(cls, slot_of_token: Sequence[int], device: torch.device) -> LoRABatch | None:
        """None when no token uses an adapter: such a step runs no LoRA kernel."""
        members: dict[int, list[int]] = {}
        for token, slot in enumerate(slot_of_token):
            if slot != BASE_SLOT:
                members.setdefault(slot, []).append(token)
        if not members:
            return None
        slots = tuple(sorted(members))
        order: list[int] = []
        spans: list[tuple[int, int]] = []
        tiles: list[tuple[int, int, int]] = []
        for slot in slots:
            start, end = len(order), len(order) + len(members[slot])
            order += members[slot]
            spans.append((start, end))
            tiles += [(slot, at, min(TILE_TOKENS, end - at)) for at in range(start, end, TILE_TOKENS)]
        index_of = {slot: i for i, slot in enumerate(slots)}
        active = [index_of.get(slot, len(slots)) for slot in slot_of_token]
        return cls(
            num_tokens=len(slot_of_token),
            slots=slots,
            spans=tuple(spans),
            order_M=torch.tensor(order, dtype=torch.int64).to(device, non_blocking=True),
            active_T=torch.tensor(active, dtype=torch.int64).to(device, non_blocking=True),
            tiles_K3=torch.tensor(tiles, dtype=torch.int32).to(device, non_blocking=True),
        )
