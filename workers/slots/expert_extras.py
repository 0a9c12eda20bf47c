"""Converts adapters on experts to an ExtraBlock's tensors, and these to the torch twin's tensors.

Each of a mixture's two linears has a record and the tensors that the record points to.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lorafleet.kernels.extras.extra_tables import ExtraTables, Int64s
from lorafleet.kernels.moe.expert_lora import RECORD_FIELDS, ExpertWeights
from lorafleet.protocol.yield_gil import yielding_gil
from lorafleet.workers.adapters.expert_factors import ExpertFactors
from lorafleet.workers.adapters.forms import StackedLowRank
from lorafleet.workers.slots.base_parts import BaseParts
from lorafleet.workers.slots.extra_block import ExtraBlock, Extras
from lorafleet.workers.slots.lora_model import LoRAModel


def expert_tensors(model: LoRAModel, base: BaseParts) -> Extras:
    tensors: dict[str, Tensor | ExpertFactors] = {}
    for i, module in yielding_gil(enumerate(base.mixtures)):
        for k, weights in enumerate(model.experts.get(module, ())):
            if weights is not None:
                tensors |= _with_record(i, k, weights)
    return tensors


def write_addresses(extra: ExtraBlock, base: BaseParts, tables: ExtraTables, address_V: Int64s) -> None:
    """Writes the records' addresses into address_V, which has the rows that ExtraTables.write_slot takes."""
    for i in range(len(base.mixtures)):
        for k in range(2):
            address_V[tables.expert_row(i, k)] = extra.address(_name(i, k, "record"))


def expert_weights(extra: ExtraBlock, mixture: int, linear: int) -> ExpertWeights | None:
    a, b, scale = (extra.get(_name(mixture, linear, part)) for part in ("a", "b", "scale"))
    if a is None or b is None or scale is None:
        return None
    return ExpertWeights(a.flatten(1, 2), b.flatten(1, 2), scale)


def _with_record(mixture: int, linear: int, weights: StackedLowRank) -> Extras:
    """Returns the tensors with the record first, since its offsets are relative to its own address."""
    groups = weights.scaling_EG.shape[1]
    assert linear == 0 or groups == 1, "the kernels of down read one group"
    record_F = torch.zeros(RECORD_FIELDS, dtype=torch.int64)
    parts: Extras = {"record": record_F, "a": weights.a_EGRD, "b": weights.b_EPOR, "scale": weights.scaling_EG}
    tensors = {_name(mixture, linear, part): tensor for part, tensor in parts.items()}
    offsets = list(ExtraBlock.offsets(tensors).values())
    record_F[:5] = torch.from_numpy(np.array([*offsets[1:], weights.rank, groups]))
    return tensors


def _name(mixture: int, linear: int, part: str) -> str:
    return f"experts {mixture} {('gate_up', 'down')[linear]} {part}"
