"""One layer of the decoder: attention or a recurrence, the MLP or a mixture of experts, and what stands beside them.

Some families' layers have one of the two halves alone.
"""

# T tokens · D hidden size · N residual streams

from __future__ import annotations

import torch
from torch import Tensor, nn

from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.workers.bases.layer_config import (
    AttentionConfig,
    DeltaNetConfig,
    LatentAttentionConfig,
    LayerConfig,
    ParallelMixerConfig,
)
from lorafleet.workers.bases.per_layer_config import OUT_NORM
from lorafleet.workers.bases.recurrence_config import Mamba2Config, ShortConvConfig
from lorafleet.workers.models.alternating_updates import StreamLayer
from lorafleet.workers.models.attention import Attention, StepContext
from lorafleet.workers.models.beside_experts import BesideExperts
from lorafleet.workers.models.delta_net import DeltaNet
from lorafleet.workers.models.latent_attention import LatentAttention
from lorafleet.workers.models.layers import Norm, PackedLinear, ResidualSum, parameter
from lorafleet.workers.models.mamba2 import Mamba2, ParallelMixer
from lorafleet.workers.models.mlp import MLP
from lorafleet.workers.models.per_layer_embedding import PerLayerBranch
from lorafleet.workers.models.short_conv import ShortConv
from lorafleet.workers.models.sparse_mlp import SparseMLP
from lorafleet.workers.tp.group import TPGroup
from lorafleet.workers.tp.row_parallel_sum import RankSum
from lorafleet.workers.tp.shard import Shard

_Mixer = Attention | LatentAttention | DeltaNet | Mamba2 | ShortConv | ParallelMixer


class DecoderLayer(nn.Module):
    """One layer of the decoder. attention_out_norm and mlp_out_norm are applied to the branches before the residual is
    added. They are None if the model has none."""

    def __init__(
        self,
        shard: Shard,
        index: int,
        group: TPGroup,
        ranks: RankSum,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        model = shard.local
        layer, experts = model.layers[index], model.experts_of(index)
        beside = None if experts is None else experts.beside
        self.index = index
        self.config: LayerConfig = layer

        def norm(name: str | None) -> Norm | None:
            return None if name is None else Norm(model.hidden_size, model.norm, model.norm_dtype(dtype), device)

        def residual_sum(name: str | None) -> ResidualSum:
            return ResidualSum(norm(name), model.residual_scale, model.norm.eps, ranks)

        self.attention_in = residual_sum(layer.norms.before_attention)
        self.mixer = _mixer(shard, index, group, dtype, device)
        self.attention_out_norm = norm(layer.norms.after_attention)
        self.mlp_in = residual_sum(layer.norms.before_mlp)
        self.mlp: MLP | SparseMLP | None = None
        if experts is not None and beside is None:
            self.mlp = SparseMLP(model.hidden_size, experts, dtype, device, adds_bias=group.rank == 0)
        elif layer.mlp is not None:
            self.mlp = MLP(layer.mlp, model.hidden_size, group, dtype, device)
        self.mlp_out_norm = norm(layer.norms.after_mlp)
        self.beside: BesideExperts | None = None
        if experts is not None and beside is not None:
            self.beside = BesideExperts(model, experts, beside, group, dtype, device)
        self.per_layer: PerLayerBranch | None = None
        if model.per_layer is not None:
            self.per_layer = PerLayerBranch(model, model.per_layer, group, dtype, device)
        self.streams: StreamLayer | None = None
        if model.altup is not None:
            self.streams = StreamLayer(model, model.altup, dtype, device)
        self.scalar = None if layer.scalar_name is None else parameter(1, dtype=dtype, device=device)
        self._end = residual_sum(None)

    def forward(self, x_TD: Tensor, residual_TD: Tensor, step: StepContext, next_sum: ResidualSum) -> Tensor:
        """Adds the outputs of attention and MLP to the residual, in place, and returns next_sum's norm of it.

        x is the first norm's output. The next layer's norm adds the MLP's output to the residual in one launch. In the
        same way the second norm here adds the attention's output.
        """
        out: LinearOutput
        if self.mixer is None or self.mlp is None:
            return next_sum.add(self._half(x_TD, step), residual_TD, step.lora)
        attended = self.mixer(x_TD, step)
        if self.config.norms.is_parallel:
            out = self.mlp(x_TD, step.lora)
            self.mlp_in.add(attended, residual_TD, step.lora)
        else:
            out = self.mlp(self.mlp_in.add(attended, residual_TD, step.lora, self.attention_out_norm), step.lora)
        if self.beside is None and self.per_layer is None and self.scalar is None:
            return next_sum.add(out, residual_TD, step.lora, self.mlp_out_norm)
        return self._finish(out, residual_TD, step, next_sum)

    def _half(self, x_TD: Tensor, step: StepContext) -> LinearOutput:
        """Returns the output of the only half that the layer has."""
        if self.mixer is not None:
            mixed: LinearOutput = self.mixer(x_TD, step)
            return mixed
        assert self.mlp is not None
        out: LinearOutput = self.mlp(x_TD, step.lora)
        return out

    def _finish(self, out: LinearOutput, residual_TD: Tensor, step: StepContext, next_sum: ResidualSum) -> Tensor:
        """Adds the MLP's output and what stands beside or behind it, each in launches of its own.

        The scalar and the next norm could be one launch with the last addition, if the norm's kernel took a scalar.
        """
        if self.beside is None:
            self._end.add(out, residual_TD, step.lora, self.mlp_out_norm)
        else:
            both_TD = self.beside(out, residual_TD, step.lora)
            self._end.add_whole(both_TD, residual_TD, step.lora, self.mlp_out_norm)
        if self.per_layer is not None:
            assert step.per_layer_TLp is not None
            branch = self.per_layer(residual_TD, step.per_layer_TLp[:, self.index], step.lora)
            self._end.add(branch, residual_TD, step.lora, self.per_layer.norm)
        if self.scalar is not None:
            residual_TD.mul_(self.scalar)
        return next_sum.read(residual_TD, step.lora)

    def alternate(self, stream_NTD: Tensor, step: StepContext) -> Tensor:
        """Returns the streams behind the layer, in a model that has several. The layer computes the active one."""
        assert self.streams is not None and self.mixer is not None and self.mlp is not None
        lora = step.lora
        prediction_NTD = self.streams.predict(stream_NTD, lora)
        residual_TD = prediction_NTD[self.streams.config.active].clone()
        x_TD = self.attention_in.read(residual_TD, lora)
        self._end.add(self.mixer(x_TD, step), residual_TD, lora, self.attention_out_norm)
        residual_TD.add_(self.streams.laurel(x_TD, lora)).mul_(2**-0.5)
        out = self.mlp(self.mlp_in.read(residual_TD, lora), lora)
        self._end.add(out, residual_TD, lora, self.mlp_out_norm)
        corrected_NTD = self.streams.correct(prediction_NTD, residual_TD, lora)
        if self.per_layer is not None:
            assert step.per_layer_TLp is not None
            read_TD = self.streams.scaled(corrected_NTD[self.streams.config.active])
            branch = self.per_layer(read_TD, step.per_layer_TLp[:, self.index], lora)
            added_TD = torch.zeros_like(residual_TD)
            self._end.add(branch, added_TD, lora, self.per_layer.norm)
            corrected_NTD[1:] += added_TD
        return corrected_NTD

    def norms(self) -> dict[str, Norm]:
        """Returns the norms by the names that checkpoints and adapters give them."""
        names = self.config.norms
        found: dict[str | None, Norm | None] = {
            names.before_attention: self.attention_in.norm,
            names.after_attention: self.attention_out_norm,
        }
        if self.mixer is not None:
            found.update(self.mixer.norms())
        found |= {names.before_mlp: self.mlp_in.norm, names.after_mlp: self.mlp_out_norm}
        if self.beside is not None:
            found.update(self.beside.norms())
        if self.per_layer is not None:
            found[OUT_NORM] = self.per_layer.norm
        if self.streams is not None:
            found.update(self.streams.norms())
        return {name: norm for name, norm in found.items() if name is not None and norm is not None}

    def packed_linears(self) -> list[PackedLinear]:
        """Returns the linears in the order of ModelConfig.packed_projections."""
        found = [] if self.mixer is None else self.mixer.packed_linears()
        if isinstance(self.mlp, MLP):
            found += [self.mlp.up_proj, self.mlp.down_proj]
        if self.mixture is not None:
            found += self.mixture.packed_linears()
        if self.per_layer is not None:
            found += [self.per_layer.gate, self.per_layer.projection]
        if self.streams is not None:
            found += self.streams.packed_linears()
        return found

    @property
    def mixture(self) -> SparseMLP | None:
        """The layer's mixture of experts, whether it replaces the MLP or stands beside it."""
        if self.beside is not None:
            return self.beside.mixture
        return self.mlp if isinstance(self.mlp, SparseMLP) else None

    def vectors(self) -> dict[str, Tensor]:
        """Returns the parameters that are neither of a linear nor of a norm, by the checkpoint's names. They are whole
        on every rank. expert_tensors.py has those of a mixture."""
        found: dict[str, Tensor] = {}
        if self.config.scalar_name is not None and self.scalar is not None:
            found[self.config.scalar_name] = self.scalar
        if self.beside is not None:
            found |= self.beside.vectors()
        if self.streams is not None:
            found |= self.streams.vectors()
        return found


def _mixer(shard: Shard, index: int, group: TPGroup, dtype: torch.dtype, device: torch.device) -> _Mixer | None:
    config = shard.local.layers[index].mixer
    if config is None:
        return None
    kinds: dict[type, type[_Mixer]] = {
        AttentionConfig: Attention,
        LatentAttentionConfig: LatentAttention,
        DeltaNetConfig: DeltaNet,
        Mamba2Config: Mamba2,
        ShortConvConfig: ShortConv,
        ParallelMixerConfig: ParallelMixer,
    }
    return kinds[type(config)](shard, index, group, dtype, device)
