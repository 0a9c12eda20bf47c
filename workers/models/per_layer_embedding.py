"""Computes per-layer embeddings, a vector of each token for every layer, and the branch at a layer's end that it gates.

All of it runs as separate launches of torch beside the linears. A kernel that sums, scales and norms the vectors, and
one for the gate's product (gated_mul takes it if both factors lie in one row), would save about three launches a layer.
Every rank holds the whole table. Its columns could be divided as the gate's outputs are, without a collective.
"""

# T tokens · D hidden size · L layers · P numbers of a token's vector for one layer · p this rank's part of P
# V rows of the table

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lorafleet.kernels.decoder.gated_mul import activated
from lorafleet.kernels.decoder.rms_norm import NormWeight, rms_norm
from lorafleet.kernels.extras.affine import apply_affine
from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.lora.lora_batch import LoRABatch
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.bases.per_layer_config import PerLayerConfig
from lorafleet.workers.models.layers import Norm, PackedLinear, parameter
from lorafleet.workers.tp.group import TPGroup


class PerLayerEmbedding(nn.Module):
    """The table and the projection that give each token a vector for every layer.

    `config` is the whole model's. Each rank computes all vectors, and returns its part of each.
    """

    def __init__(
        self, model: ModelConfig, config: PerLayerConfig, group: TPGroup, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self._size = config.size
        each = config.size // group.size
        self._own = slice(group.rank * each, (group.rank + 1) * each)
        self._embed_scale = torch.tensor(config.size**0.5, dtype=dtype).item()  # rounded to the model's dtype
        self._projection_scale = model.hidden_size**-0.5
        self.table_VD = parameter(config.vocab_size, model.num_layers * config.size, dtype=dtype, device=device)
        projection = config.model_projection(model.hidden_size, model.num_layers)
        self.projection = PackedLinear.of([projection], dtype, device)
        self.norm = Norm(config.size, model.norm, model.norm_dtype(dtype), device)

    def forward(self, token_T: Tensor, embedded_TD: Tensor, lora: LoRABatch | None) -> Tensor:
        """Returns this rank's part of the vectors, [T, L, p]. `embedded_TD` is the sum of the ranks' embeddings."""
        projected = apply_affine(self.projection(embedded_TD, lora)) * self._projection_scale
        row_T = torch.where(token_T < len(self.table_VD), token_T, 0)
        row_TLP = self._vectors(F.embedding(row_T, self.table_VD) * self._embed_scale)
        vector_TLP = (self._normed(self._vectors(projected), self.norm.for_step(lora)) + row_TLP) * 2**-0.5
        return vector_TLP[:, :, self._own]

    def _vectors(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1, self._size)

    def _normed(self, x_TLP: Tensor, weight: NormWeight) -> Tensor:
        """Returns the norm of each vector. A token's own weight is for all of its vectors."""
        if not x_TLP.is_cuda:
            return rms_norm(x_TLP, weight, self.norm.eps)
        own_T = weight.own_T
        own = None if own_T is None else own_T.repeat_interleave(x_TLP.shape[1])
        return rms_norm(x_TLP.flatten(0, 1), weight._replace(own_T=own), self.norm.eps).view(x_TLP.shape)


class PerLayerBranch(nn.Module):
    """The branch at the end of one layer. `norm` is for its output, once that is summed over the ranks."""

    def __init__(
        self, model: ModelConfig, config: PerLayerConfig, group: TPGroup, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self._activation = config.activation
        each = config.size // group.size
        self.gate = PackedLinear(model.hidden_size, (each,), False, dtype, device)
        self.projection = PackedLinear(each, (model.hidden_size,), False, dtype, device)
        self.norm = Norm(model.hidden_size, model.norm, model.norm_dtype(dtype), device)

    def forward(self, residual_TD: Tensor, vector_Tp: Tensor, lora: LoRABatch | None) -> LinearOutput:
        """Returns the branch's output, to be summed over the ranks, normed and added to the residual."""
        gated_Tp = activated(self.gate(residual_TD, lora), self._activation).mul_(vector_Tp)
        out: LinearOutput = self.projection(gated_Tp, lora)
        return out
