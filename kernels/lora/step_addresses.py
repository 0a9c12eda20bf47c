"""The addresses of the adapters that a step's tiles and tokens use, looked up once and read by every layer."""

# T tokens in the step · K tiles · V rows of extras

from __future__ import annotations

from torch import Tensor

from lorafleet.kernels.extras.extra_tables import ExtraTables
from lorafleet.kernels.lora.packed_lora import LoRATables
from lorafleet.kernels.lora.tile_tables import TileTables


class StepAddresses:
    """Looks up addresses for the slots of a plan, whose memory never moves.

    Args:
        tables: The addresses by slot.
        slot_K: Each tile's slot, int32.
        slot_T: Each token's slot, int32.
    """

    def __init__(self, tables: LoRATables, slot_K: Tensor, slot_T: Tensor) -> None:
        self._by_slot = tables
        self._slot_K, self._slot_T = slot_K, slot_T
        self._tables: TileTables | None = None
        self._address_VT: Tensor | None = None

    def look_up(self) -> None:
        """Looks up the addresses of the slots that the plan has now, on the current stream."""
        if self._tables is None:
            self._tables = TileTables(self._by_slot, len(self._slot_K))
        self._tables.gather(self._slot_K)
        self._address_VT = self.extras.by_token(self._slot_T)

    @property
    def extras(self) -> ExtraTables:
        return self._by_slot.extras

    @property
    def tables(self) -> TileTables:
        assert self._tables is not None, "LoRABatch.begin() comes before the first linear"
        return self._tables

    def affine(self, linear: int) -> Tensor:
        """Returns the addresses that kernels/extras/affine.py reads: int64 [2, T], on the device."""
        assert self._address_VT is not None, "LoRABatch.begin() comes before the first linear"
        return self._address_VT.narrow(0, self.extras.affine_row(linear), 2)

    def norm(self, norm: int) -> Tensor:
        """Returns the addresses that kernels/lora/norm_slots.py reads: int64 [T], on the device."""
        assert self._address_VT is not None, "LoRABatch.begin() comes before the first norm"
        return self._address_VT[self.extras.norm_row(norm)]

    def embedding(self) -> Tensor:
        """Returns the addresses that kernels/extras/slot_embedding.py reads: int64 [T], on the device."""
        assert self._address_VT is not None, "LoRABatch.begin() comes before the embedding"
        return self._address_VT[self.extras.embedding_row]
