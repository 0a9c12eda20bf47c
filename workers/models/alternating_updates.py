"""Computes alternating updates, in which a model has several residual streams and each layer computes one of them.

The streams are stacked as [N, T, D]. Everything here is plain torch beside the linears, about twenty launches a layer,
and every rank computes all of it. One kernel that reads the streams once for predictions, and one for corrections,
would save most of them.
"""

# T tokens · D hidden size · N streams

from __future__ import annotations

import torch
from torch import Tensor, nn

from lorafleet.kernels.decoder.rms_norm import rms_norm
from lorafleet.kernels.extras.affine import apply_affine
from lorafleet.kernels.lora.lora_batch import LoRABatch
from lorafleet.workers.bases.altup_config import LAUREL_NORM, OUTPUT_SCALE, ROUTER_NORM, AltUpConfig
from lorafleet.workers.bases.model_config import ModelConfig
from lorafleet.workers.models.layers import Norm, PackedLinear, parameter

LEAST_SQUARE = 1e-5  # bounds the mean square of a stream from below, before it is divided by


class Streams(nn.Module):
    """The linears that make streams of an embedding, and one output of the streams."""

    def __init__(self, model: ModelConfig, config: AltUpConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        linears = [PackedLinear.of([p], dtype, device) for p in config.projections_outside(model.hidden_size)]
        self.projections = nn.ModuleList(linears[: config.num_streams - 1])
        self.unembeddings = nn.ModuleList(linears[config.num_streams - 1 :])

    def start(self, embedded_TD: Tensor, lora: LoRABatch | None) -> Tensor:
        """Returns the streams [N, T, D] of embeddings, all of the embedding's magnitude."""
        others = [_as_large(apply_affine(linear(embedded_TD, lora)), embedded_TD) for linear in self.projections]
        return torch.stack([embedded_TD, *others])

    def merge(self, stream_NTD: Tensor, lora: LoRABatch | None) -> Tensor:
        """Returns the mean of the streams [T, D], once all are of the first one's magnitude."""
        first_TD, *others = stream_NTD
        merged = [
            _as_large(apply_affine(linear(stream_TD, lora)), first_TD)
            for linear, stream_TD in zip(self.unembeddings, others, strict=True)
        ]
        return torch.stack([first_TD, *merged]).mean(dim=0)

    def packed_linears(self) -> list[PackedLinear]:
        """Returns the linears in the order of AltUpConfig.projections_outside."""
        return [linear for linear in (*self.projections, *self.unembeddings) if isinstance(linear, PackedLinear)]


class StreamLayer(nn.Module):
    """The modules that a layer has for its streams, and the low-rank linear beside its attention."""

    def __init__(self, model: ModelConfig, config: AltUpConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config = config
        self._router_factor = model.hidden_size**-1.0
        self.router, self.prediction, self.correction, self.left, self.right = (
            PackedLinear.of(projections, dtype, device) for projections in config.packed(model.hidden_size)
        )
        self.router_norm, self.laurel_norm = (
            Norm(model.hidden_size, model.norm, model.norm_dtype(dtype), device) for _ in range(2)
        )
        self.output_scale_D = parameter(model.hidden_size, dtype=dtype, device=device)

    def predict(self, stream_NTD: Tensor, lora: LoRABatch | None) -> Tensor:
        """Returns the layer's predictions of all streams, [N, T, D]."""
        count = self.config.num_streams
        modality_TN = self._modalities(stream_NTD[self.config.active], lora)
        coefficient_TNN = apply_affine(self.prediction(modality_TN, lora)).view(-1, count, count)
        mixed_TND = torch.bmm(coefficient_TNN, stream_NTD.transpose(0, 1))
        return (mixed_TND.transpose(0, 1) + stream_NTD).contiguous()

    def correct(self, prediction_NTD: Tensor, computed_TD: Tensor, lora: LoRABatch | None) -> Tensor:
        """Returns the streams behind the layer, [N, T, D]. `computed` is what it computed for the active one."""
        modality_TN = self._modalities(computed_TD, lora)
        coefficient_TN = apply_affine(self.correction(modality_TN, lora)) + 1.0
        error_TD = computed_TD - prediction_NTD[self.config.active]
        return (prediction_NTD + error_TD * coefficient_TN.T.unsqueeze(2)).contiguous()

    def scaled(self, active_TD: Tensor) -> Tensor:
        """Returns the active stream as the per-layer embedding's gate reads it."""
        return active_TD * self.output_scale_D if self.config.scales_output else active_TD

    def laurel(self, x_TD: Tensor, lora: LoRABatch | None) -> Tensor:
        """Returns x and its normed low-rank product."""
        low_rank_TD = apply_affine(self.right(apply_affine(self.left(x_TD, lora)), lora))
        return x_TD + rms_norm(low_rank_TD, self.laurel_norm.for_step(lora), self.laurel_norm.eps)

    def norms(self) -> dict[str, Norm]:
        """Returns the norms by their names below the layer."""
        return {ROUTER_NORM: self.router_norm, LAUREL_NORM: self.laurel_norm}

    def vectors(self) -> dict[str, Tensor]:
        """Returns the parameters that belong to no linear or norm, by their names below the layer."""
        return {OUTPUT_SCALE: self.output_scale_D}

    def packed_linears(self) -> list[PackedLinear]:
        """Returns the linears in the order of AltUpConfig.packed."""
        return [self.router, self.prediction, self.correction, self.left, self.right]

    def _modalities(self, x_TD: Tensor, lora: LoRABatch | None) -> Tensor:
        """Returns what the coefficients are computed from, [T, N]."""
        normed_TD = rms_norm(x_TD.contiguous(), self.router_norm.for_step(lora), self.router_norm.eps)
        routed_TN = apply_affine(self.router(normed_TD * self._router_factor, lora))
        return torch.tanh(routed_TN.float()).to(x_TD.dtype)


def _as_large(x_TD: Tensor, model_TD: Tensor) -> Tensor:
    """Returns x, scaled so that each row has the magnitude of the model's row."""
    magnitude_T1 = model_TD.square().mean(-1, keepdim=True).sqrt()
    return x_TD * magnitude_T1 / x_TD.square().mean(-1, keepdim=True).clamp(min=LEAST_SQUARE).sqrt()
