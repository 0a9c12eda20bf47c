"""Describes the parts of the base model on this rank that its adapters are packed for."""

# O this rank's outputs of all slices

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
                BasePart(names, sharding.place(names), _on_cpu(linear.added_bias))
                for names, linear in model.packed_linears()
            ],
            [name for name, _ in model.norms()],
            1.0 if model.config.norm.adds_one else 0.0,
            [name for name, _ in model.mixtures()],
        )


def _on_cpu(bias_O: Tensor | None) -> Tensor | None:
    return None if bias_O is None else bias_O.float().cpu()
