"""Addresses of each slot's extras, which are what an adapter has besides A and B.

A row belongs to one vector, or record, of one linear or norm of the model. For each slot it holds the device address
of that vector, or 0 if the slot has none. The rows come in this order:

- for each linear, its output's scale and bias, side by side
- the norms' weights
- the embedding's record (kernels/extras/slot_embedding.py)
- the linears' Kronecker records (kernels/extras/kronecker.py)
- for each mixture of experts, two records: for its gate_up and for its down (kernels/moe/expert_lora.py)

This module does not own the memory at these addresses.
"""

# V rows · S slots · T tokens

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

Int64s = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class ExtraTables:
    """The table of addresses by row and slot, on the device."""

    def __init__(
        self, num_linears: int, num_norms: int, max_loras: int, device: torch.device, num_mixtures: int = 0
    ) -> None:
        self._num_linears = num_linears
        self.embedding_row = 2 * num_linears + num_norms
        self.num_by_token = self.embedding_row + 1  # number of rows that readers look up by token
        num_rows = self.num_by_token + num_linears + 2 * num_mixtures
        self.address_VS = torch.zeros(num_rows, max_loras, dtype=torch.int64, device=device)
        self.kronecker_slots: set[int] = set()  # slots with Kronecker products, on the host
        self.expert_slots: set[int] = set()  # slots with adapters on experts, on the host
        self.rope_slots: set[int] = set()  # slots whose tokens have angles of their own, on the host
        self._filled: set[int] = set()

    @property
    def num_rows(self) -> int:
        return len(self.address_VS)

    def affine_row(self, linear: int) -> int:
        """Returns the row of the linear's scale. The row of its bias is the next one."""
        return 2 * linear

    def norm_row(self, norm: int) -> int:
        return 2 * self._num_linears + norm

    def kronecker_row(self, linear: int) -> int:
        return self.num_by_token + linear

    def expert_row(self, mixture: int, linear: int) -> int:
        """Returns the row of a mixture's gate_up (linear 0) or down (linear 1)."""
        return self.num_by_token + self._num_linears + 2 * mixture + linear

    def write_slot(self, slot: int, address_V: Int64s | None) -> None:
        """Writes the slot's addresses on the current stream; the host does not wait.

        None means that the slot's adapter has no extras. This costs nothing if the previous adapter had none either.
        """
        self.kronecker_slots.discard(slot)
        self.expert_slots.discard(slot)
        if address_V is None:
            if slot in self._filled:
                self.address_VS[:, slot] = 0
                self._filled.discard(slot)
            return
        assert address_V.shape == (self.num_rows,)
        host = torch.from_numpy(np.ascontiguousarray(address_V))
        if self.address_VS.is_cuda:
            host = host.pin_memory()
        self.address_VS[:, slot] = host.to(self.address_VS.device, non_blocking=True)
        self._filled.add(slot)
        first_expert_row = self.expert_row(0, 0)
        if address_V[self.num_by_token : first_expert_row].any():
            self.kronecker_slots.add(slot)
        if address_V[first_expert_row:].any():
            self.expert_slots.add(slot)

    def has_rare(self, slots: Iterable[int]) -> bool:
        """Returns whether an adapter in one of these slots has what hardly any has: Kronecker products or angles of its
        own. BASE_SLOT never does."""
        rare = self.kronecker_slots | self.rope_slots
        return bool(rare) and not rare.isdisjoint(slots)

    def has_experts(self, slots: Iterable[int]) -> bool:
        """Returns whether an adapter in one of these slots is on experts. BASE_SLOT never is."""
        return not self.expert_slots.isdisjoint(slots)

    def by_token(self, slot_T: Tensor) -> Tensor:
        """Returns each token's own addresses, [V, T] of the first num_by_token rows, with 0 for base tokens. slot_T is
        int32."""
        if slot_T.is_cuda:
            from lorafleet.kernels.extras.extra_tables_triton import by_token_triton  # triton is optional on a CPU

            return by_token_triton(slot_T, self.address_VS, self.num_by_token)
        addresses_VT = self.address_VS[: self.num_by_token, slot_T.clamp(min=0).long()]
        return addresses_VT.masked_fill_(slot_T < 0, 0)
