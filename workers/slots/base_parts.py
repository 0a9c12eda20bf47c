"""Describes the parts of the base model on this rank that its adapters are packed for."""

# O this rank's outputs of all slices

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lorafleet.kernels.lora.packed_lora import LinearPlace
from lorafleet.workers.models.engine_model import EngineModel
from lorafleet.workers.tp.adapter_sharding import AdapterSharding


@dataclass(frozen=True, slots=True)
class BasePart:
    """A packed linear of the base model on this rank."""

    names: tuple[str, ...]  # Module paths of its projections.
    place: LinearPlace  # This rank's part of the whole linear.
    bias_O: Tensor | None = None  # Bias that it adds on this rank, float32 on the CPU; None if it adds none.
    held_O: Tensor | None = None  # The same bias in the model, of which bias_O is a copy.


@dataclass(frozen=True, slots=True)
class BaseParts:
    """All parts of the base model on this rank. Each list is in the order of the tables' rows."""

    linears: Sequence[BasePart]
    norms: Sequence[str] = ()  # Module paths.
    norm_added: float = 0.0  # Number that is added to norm weights as checkpoints store them.
    mixtures: Sequence[str] = ()  # Module paths of the mixtures of experts.

    @classmethod
    def of(cls, model: EngineModel, sharding: AdapterSharding) -> BaseParts:
        """Returns the parts of a model whose adapters are divided by `sharding`."""
        return cls(
            [
                BasePart(names, sharding.place(names), _on_cpu(linear.added_bias), linear.added_bias)
                for names, linear in model.packed_linears()
            ],
            [name for name, _ in model.norms()],
            1.0 if model.config.norm.adds_one else 0.0,
            [name for name, _ in model.mixtures()],
        )

    def refresh(self) -> None:
        """Copies the biases of the model again, after its weights have been read again."""
        for part in self.linears:
            if part.bias_O is not None and part.held_O is not None:
                part.bias_O.copy_(part.held_O)


def _on_cpu(bias_O: Tensor | None) -> Tensor | None:
    return None if bias_O is None else bias_O.to("cpu", torch.float32, copy=True)
