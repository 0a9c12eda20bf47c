"""Describes per-layer embeddings, which give each token a short vector for every layer, beside its embedding.

The vector of a layer is the sum of a row in a table and of a projection of the token's embedding. At the end of each
layer it multiplies a gate that is computed from the residual, and a projection of the product is added to the residual.
workers/models/per_layer_embedding.py computes it.
"""

# D hidden size · L layers · P numbers of a token's vector for one layer

from __future__ import annotations

from dataclasses import dataclass

from lorafleet.kernels.decoder.gated_mul import Activation
from lorafleet.workers.bases.projection import Projection, Units

TABLE = "embed_tokens_per_layer"
MODEL_PROJECTION = "per_layer_model_projection"
PROJECTION_NORM = "per_layer_projection_norm"
OUT_NORM = "post_per_layer_input_norm"


@dataclass(frozen=True, slots=True)
class PerLayerConfig:
    """The per-layer embeddings of a model. The names of their modules are transformers'."""

    size: int  # P
    vocab_size: int  # rows of the table; a token behind its end takes row 0
    activation: Activation  # of the gate

    def packed(self, hidden_size: int) -> tuple[tuple[Projection, ...], ...]:
        """Returns the linears at the end of a layer: the gate, and the projection of the product."""
        hidden, inner = Units(hidden_size), Units(self.size)
        gate = Projection("per_layer_input_gate", hidden, (inner,))
        return (gate,), (Projection("per_layer_projection", inner, (hidden,), split="inputs"),)

    def model_projection(self, hidden_size: int, num_layers: int) -> Projection:
        """Returns the projection of an embedding to the vectors of all layers. Its rows are those of layer 0, then
        those of layer 1 and so on. All ranks compute all of it, since a norm over each layer's vector follows."""
        return Projection(MODEL_PROJECTION, Units(hidden_size), (Units(num_layers * self.size),), split="nothing")
