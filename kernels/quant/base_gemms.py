"""Names the GEMMs of a base by its weights, for kernels/lora/sm_split.py."""

from __future__ import annotations

from collections.abc import Iterable

from lorafleet.kernels.lora.sm_split import GEMMs
from lorafleet.kernels.quant.base_weight import BaseWeight, PlainWeight
from lorafleet.kernels.quant.scaled_weight import ScaledWeight
from lorafleet.kernels.quant.tiled_weight import TiledWeight


def gemms_of(weights: Iterable[BaseWeight]) -> GEMMs | None:
    """Returns the GEMMs that all of the weights have for few tokens, or None if no split was measured with them."""
    kinds = {_gemms(weight) for weight in weights}
    return kinds.pop() if len(kinds) == 1 else None


def _gemms(weight: BaseWeight) -> GEMMs | None:
    if isinstance(weight, PlainWeight):
        return "plain"
    if isinstance(weight, TiledWeight):
        return "four bits"
    return "e4m3" if isinstance(weight, ScaledWeight) and weight.pair_tokens > 0 else None
