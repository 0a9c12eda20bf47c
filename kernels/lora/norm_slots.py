"""The slots' own weights of one norm, which replace the base's weights."""

# T tokens · D size of the norm

from __future__ import annotations

from torch import Tensor

from lorafleet.kernels.decoder.rms_norm import NormWeight
from lorafleet.kernels.lora.lora_batch import LoRABatch
from lorafleet.kernels.lora.packed_lora import LoRATables


class NormSlots:
    """The slots of one norm. Its index counts the model's norms in the order of the tables' rows."""

    def __init__(self, index: int, tables: LoRATables) -> None:
        self._index = index
        self._weights: list[Tensor | None] = [None] * tables.extras.address_VS.shape[1]

    def set_slot(self, slot: int, weight_D: Tensor | None) -> None:
        """Sets a slot's weight for the torch twin. It is float32."""
        self._weights[slot] = weight_D

    def for_step(self, weight_D: Tensor, batch: LoRABatch) -> NormWeight:
        """Returns the norm's weights for a step. weight_D is the base's weight."""
        if weight_D.is_cuda:
            return NormWeight(weight_D, batch.addresses.norm(self._index))
        own = {slot: weight for slot in batch.slots if (weight := self._weights[slot]) is not None}
        if not own:
            return NormWeight(weight_D)
        weight_TD = weight_D.float().repeat(batch.num_tokens, 1)
        for slot, (start, end) in zip(batch.slots, batch.spans, strict=True):
            if slot in own:
                weight_TD[batch.order_T[start:end]] = own[slot]
        return NormWeight(weight_TD)
