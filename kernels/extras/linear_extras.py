"""One slot's extras on one packed linear (besides A and B), as the torch twin reads them."""

# O this rank's outputs of all slices

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lorafleet.kernels.extras.kronecker import KroneckerPart


@dataclass(frozen=True, slots=True)
class LinearExtras:
    """The extras in y = scale_O * (base + delta) + bias_O. A, B and kroneckers give delta; base has its own bias."""

    scale_O: Tensor | None  # float32; None is 1
    bias_O: Tensor | None  # float32; None is 0
    kroneckers: tuple[KroneckerPart | None, ...]  # one per slice
