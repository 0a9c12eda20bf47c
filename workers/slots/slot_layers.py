"""Connects the layers of the model with their parts of the slots, and fills these parts on a CPU.

On a GPU the kernels find a slot's weights by the tables' addresses. The torch twins take them from here, as tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lorafleet.kernels.extras.slot_embedding import EmbeddingSlots
from lorafleet.kernels.lora.norm_slots import NormSlots
from lorafleet.kernels.lora.packed_lora import LoRATables, PackedLoRA
from lorafleet.kernels.moe.expert_lora import ExpertLoRA
from lorafleet.workers.models.engine_model import EngineModel
from lorafleet.workers.slots.expert_extras import expert_weights
from lorafleet.workers.slots.extra_block import ExtraBlock
from lorafleet.workers.slots.linear_extra_parts import linear_extras, norm_weight
from lorafleet.workers.slots.lora_model import expert_dtype
from lorafleet.workers.slots.packed_adapter import PackedAdapter
from lorafleet.workers.slots.vocab_extras import slot_embedding
from lorafleet.workers.slots.vocab_weights import vocab_dtype
from lorafleet.workers.tp.adapter_sharding import AdapterSharding


@dataclass(frozen=True, slots=True)
class SlotLayers:
    """The slots of each layer. Each list is in the order of the tables' rows."""

    linears: list[PackedLoRA]
    norms: list[NormSlots]
    mixtures: list[tuple[ExpertLoRA, ExpertLoRA]]  # gate_up and down of each
    embeddings: EmbeddingSlots

    @classmethod
    def attach(
        cls, model: EngineModel, sharding: AdapterSharding, tables: LoRATables, max_rank: int, dtype: torch.dtype
    ) -> SlotLayers:
        """Gives each layer of the model its slots, whose A and B are of this dtype."""
        embeddings = model.embed_tokens.slots = EmbeddingSlots(tables, vocab_dtype(dtype))
        layers = cls([], [], [], embeddings)
        for index, (names, linear) in enumerate(model.packed_linears()):
            linear.lora = _packed_lora(index, names, sharding, tables)
            linear.lora.dtype = dtype
            assert linear.lora.in_features == linear.in_features, "the base and its adapters are divided alike"
            layers.linears.append(linear.lora)
        for index, (_, norm) in enumerate(model.norms()):
            norm.slots = NormSlots(index, tables)
            layers.norms.append(norm.slots)
        for index, (_, mixture) in enumerate(model.mixtures()):
            up, down = (ExpertLoRA(index, k, tables, max_rank, expert_dtype(dtype)) for k in range(2))
            mixture.lora = up, down
            layers.mixtures.append(mixture.lora)
        return layers

    def set_slot(self, slot: int, adapter: PackedAdapter | None, extra: ExtraBlock | None) -> None:
        """Sets the torch twins' tensors of the slot."""
        for index, linear in enumerate(self.linears):
            weights = None
            if adapter is not None:
                weights = adapter.weights(index, linear.in_features, linear.out_features, linear.layout)
            linear.set_slot(slot, weights)
            linear.extras[slot] = None if extra is None else linear_extras(extra, index)
        for index, norm in enumerate(self.norms):
            norm.set_slot(slot, None if extra is None else norm_weight(extra, index))
        for index, mixture in enumerate(self.mixtures):
            for k, lora in enumerate(mixture):
                lora.slots[slot] = None if extra is None else expert_weights(extra, index, k)
        self.embeddings.set_slot(slot, None if extra is None else slot_embedding(extra))


def _packed_lora(index: int, names: tuple[str, ...], sharding: AdapterSharding, tables: LoRATables) -> PackedLoRA:
    """Builds the PackedLoRA of one linear. `names` are the module paths of its projections, which share an input and
    therefore a layout."""
    inputs = sharding.input(names[0])
    out_features = tuple(sum(part.stop - part.start for part in sharding.outputs(name)) for name in names)
    layout, place = sharding.layout(names[0]), sharding.place(names)
    return PackedLoRA(index, inputs.stop - inputs.start, out_features, tables, layout, place)
