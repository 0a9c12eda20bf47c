"""Converts an adapter's classification head to an ExtraBlock's tensors, and applies it where these lie."""

# T tokens · D hidden size · L labels

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from lorafleet.workers.adapters.forms import ClassifierForm
from lorafleet.workers.slots.extra_block import ExtraBlock

_WEIGHT, _BIAS = "classifier weight", "classifier bias"


@dataclass(frozen=True, slots=True)
class SlotClassifier:
    """The classification head of the adapter in a slot, in float32 on the device."""

    weight_LD: Tensor
    bias_L: Tensor | None

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Returns the head's outputs for hidden states after the last norm, float32 [T, L]."""
        return F.linear(hidden_TD.float(), self.weight_LD, self.bias_L)


def classifier_tensors(form: ClassifierForm | None) -> dict[str, Tensor]:
    """Returns the head's tensors by name; none without a head."""
    if form is None:
        return {}
    tensors = {_WEIGHT: form.weight_LD.contiguous()}
    return tensors if form.bias_L is None else {**tensors, _BIAS: form.bias_L.contiguous()}


def slot_classifier(extra: ExtraBlock | None) -> SlotClassifier | None:
    """Returns the head in a slot's extras, or None if the adapter has none."""
    weight_LD = None if extra is None else extra.get(_WEIGHT)
    if extra is None or weight_LD is None:
        return None
    return SlotClassifier(weight_LD, extra.get(_BIAS))
