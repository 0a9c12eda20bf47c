"""The adapter tables by tile instead of by slot, gathered once per step for the LoRA kernels of all linears.

Idea: a program of shrink or expand that looks up tile -> slot -> address -> matrix waits for memory three times, and
there are two launches for each linear. One gather per step saves each of them one of these waits.

Memory: address [L, K, 1 + P] int64, rank [L, K, P] int32, scale [L, K, P] float32, like LoRATables by slot. All are
zero where a tile has no adapter.
"""

# L packed linears · K tiles · P slices · S slots

from __future__ import annotations

import torch
from torch import Tensor

from lorafleet.kernels.lora.packed_lora import LoRATables


class TileTables:
    """The tables of num_tiles tiles, in memory that never moves. They have no content until gather()."""

    def __init__(self, tables: LoRATables, num_tiles: int) -> None:
        self._by_slot = tables.address_LSA, tables.rank_LSP, tables.scale_LSP
        self._by_tile = tuple(t.new_empty(t.shape[0], num_tiles, t.shape[2]) for t in self._by_slot)
        self.address_LKA, self.rank_LKP, self.scale_LKP = self._by_tile

    def gather(self, slot_K: Tensor) -> None:
        """Gathers the tables of slot_K on the current stream.

        slot_K is int32 [K], negative where a tile has no adapter.
        """
        assert slot_K.shape == (self.rank_LKP.shape[1],)
        if slot_K.is_cuda:
            from lorafleet.kernels.lora.tile_tables_triton import gather_triton  # triton is optional on a CPU

            gather_triton(slot_K, self._by_slot, (self.address_LKA, self.rank_LKP, self.scale_LKP))
            return
        for source, target in zip(self._by_slot, self._by_tile, strict=True):
            torch.index_select(source, 1, slot_K.clamp(min=0), out=target)
            target[:, slot_K < 0] = 0
