"""What one slot has on one packed linear besides A and B, as the torch twin takes it."""

# O this rank's outputs of all slices

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lorafleet.kernels.extras.kronecker import KroneckerPart


@dataclass(frozen=True, slots=True)
class LinearExtras:
    """y = scale_O * (base + what A, B and kroneckers add) + bias_O, where base has the base's own bias. Vectors are
    float32; None: 1, and 0. kroneckers: of each slice."""

    scale_O: Tensor | None
    bias_O: Tensor | None
    kroneckers: tuple[KroneckerPart | None, ...]
