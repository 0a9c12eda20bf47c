"""What of the base, as this rank holds it, its adapters are packed for."""

# O this rank's outputs of all slices

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lorafleet.kernels.lora.packed_lora import LinearPlace


@dataclass(frozen=True, slots=True)
class BasePart:
    """A packed linear. names: the module paths of its projections. place: its part of the whole. bias_O: what it adds
    on this rank, float32 on the CPU."""

    names: tuple[str, ...]
    place: LinearPlace
    bias_O: Tensor | None = None


@dataclass(frozen=True, slots=True)
class BaseParts:
    """linears, norms, mixtures of experts: in the order of their tables' rows; norms and mixtures by module path.
    norm_added: to the norms' weights as checkpoints have them."""

    linears: Sequence[BasePart]
    norms: Sequence[str] = ()
    norm_added: float = 0.0
    mixtures: Sequence[str] = ()
