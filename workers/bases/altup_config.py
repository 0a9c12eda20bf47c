"""Describes alternating updates (AltUp): several residual streams, of which each layer computes one and predicts the
others.

Beside attention, such a layer has a linear of low rank that all tokens pass (LAuReL). workers/models/
alternating_updates.py computes both. Sources: AltUp, arXiv 2301.13310; LAuReL, arXiv 2411.07501.
"""

# D hidden size · N streams

from __future__ import annotations

from dataclasses import dataclass

from lorafleet.workers.bases.projection import Projection, Units

ROUTER_NORM = "altup.router_norm"
LAUREL_NORM = "laurel.post_laurel_norm"
OUTPUT_SCALE = "altup.correct_output_scale"


@dataclass(frozen=True, slots=True)
class AltUpConfig:
    """The streams of a model. The names of their modules are transformers'. All ranks hold all of them."""

    num_streams: int  # N
    active: int  # the stream that layers compute
    scales_output: bool  # a vector multiplies the active stream before the per-layer embedding's gate reads it
    laurel_rank: int

    def packed(self, hidden_size: int) -> tuple[tuple[Projection, ...], ...]:
        """Returns the linears of a layer, in the order of StreamLayer.packed_linears."""
        hidden, streams, rank = Units(hidden_size), Units(self.num_streams), Units(self.laurel_rank)
        named = {
            "altup.modality_router": (hidden, streams),
            "altup.prediction_coefs": (streams, Units(self.num_streams**2)),
            "altup.correction_coefs": (streams, streams),
            "laurel.linear_left": (hidden, rank),
            "laurel.linear_right": (rank, hidden),
        }
        return tuple((_whole(name, inputs, outputs),) for name, (inputs, outputs) in named.items())

    def projections_outside(self, hidden_size: int) -> tuple[Projection, ...]:
        """Returns the linears before the first layer, and then those behind the last, one for each inactive stream."""
        hidden = Units(hidden_size)
        return tuple(
            _whole(f"{name}.{i}", hidden, hidden)
            for name in ("altup_projections", "altup_unembed_projections")
            for i in range(self.num_streams - 1)
        )


def _whole(name: str, inputs: Units, outputs: Units) -> Projection:
    return Projection(name, inputs, (outputs,), split="nothing")
