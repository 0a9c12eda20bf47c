"""Multi-head latent attention (MLA) of one decoder layer, as DeepSeek V2 and V3 have it.

The cache holds a latent vector and a rotated key for each token, and no heads. kv_b_proj is absorbed: its rows for keys
multiply the queries, and its rows for values multiply the results, so that attention has one KV head
(kernels/lora/absorbed_lora.py shows why this is the same, with adapters too).

Prompts are computed in this form too. It is exact, but costs more arithmetic than keys and values of each head would:
for a query and a key, 2 C + R multiplications a head instead of K + R + V (1088 instead of 320 in DeepSeek-V3). A
prefill that expands the latent vectors of its context once, for each adapter, would be faster for long prompts.
"""

# T tokens · D hidden size · H this rank's heads · K numbers of a head's key that are not rotated · V of its value
# R rotated numbers · C latent size · E = C + R numbers of a cached row · Q = K + R numbers of a query

from __future__ import annotations

import torch
from torch import Tensor, nn

from lorafleet.kernels.decoder.latent_store import store_latent
from lorafleet.kernels.decoder.rms_norm import rms_norm
from lorafleet.kernels.decoder.rotate_queries import rotate_queries
from lorafleet.kernels.extras.affine import apply_affine
from lorafleet.kernels.lora.absorbed_lora import HeadRows, add_to_queries, add_to_values, scale_queries
from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.lora.lora_batch import LoRABatch
from lorafleet.workers.bases.layer_config import LatentAttentionConfig
from lorafleet.workers.bases.model_config import NormStyle
from lorafleet.workers.models.attention import StepContext
from lorafleet.workers.models.layers import Norm, PackedLinear
from lorafleet.workers.tp.group import TPGroup
from lorafleet.workers.tp.shard import Shard


class LatentAttention(nn.Module):
    """The linears and norms of latent attention. Every rank has the whole latent vector, and its own heads.

    a_proj gives the queries' latent vector, if there is one, and the cached row. q_proj is q_b_proj if there is one.
    """

    def __init__(self, shard: Shard, layer: int, group: TPGroup, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        model, config = shard.local, shard.local.layers[layer].attention
        assert isinstance(config, LatentAttentionConfig)
        self.index = model.attention_layers.index(layer)  # among the layers that have attention
        self.config = config
        q, a, kv_b, o = config.packed(model.hidden_size)
        self.q_proj = PackedLinear.of(q, dtype, device)
        self.a_proj = PackedLinear.of(a, dtype, device)
        self.kv_b_proj = PackedLinear.of(kv_b, dtype, device)
        self.o_proj = PackedLinear.of(o, dtype, device, adds_bias=group.rank == 0)
        style, norm_dtype = NormStyle(config.norm_eps, adds_one=model.norm.adds_one), model.norm_dtype(dtype)
        self.q_a_norm = None if config.q_rank is None else Norm(config.q_rank, style, norm_dtype, device)
        self.kv_a_norm = Norm(config.latent_dim, style, norm_dtype, device)
        of_head = config.nope_dim + config.value_dim
        self._key_rows = HeadRows(of_head, 0, config.nope_dim)
        self._value_rows = HeadRows(of_head, config.nope_dim, config.value_dim)

    def forward(self, x_TD: Tensor, step: StepContext) -> LinearOutput:
        config, cache = self.config, step.caches[self.index]
        cos_T1F, sin_T1F = step.rotations[self.index]
        a_TA = apply_affine(self.a_proj(x_TD, step.lora))
        store_latent(
            a_TA[:, -config.cached_dim :],
            cos_T1F,
            sin_T1F,
            self.kv_a_norm.for_step(step.lora),
            config.norm_eps,
            cache.k_NPGD,
            step.slot_mapping_T,
            cache.k_scale,
            is_interleaved=config.rope.is_interleaved,
        )
        if self.q_a_norm is not None:
            q_latent = a_TA[:, : -config.cached_dim].contiguous()
            x_TD = rms_norm(q_latent, self.q_a_norm.for_step(step.lora), config.norm_eps)
        q_THQ = apply_affine(self.q_proj(x_TD, step.lora)).unflatten(1, (config.num_heads, -1))
        q_THE = q_THQ.new_empty(*q_THQ.shape[:2], config.cached_dim)
        self._absorb_keys(q_THQ[..., : config.nope_dim], q_THE[..., : config.latent_dim], step.lora)
        rotated_THR = q_THE[..., config.latent_dim :]
        rotate_queries(q_THQ[..., config.nope_dim :], cos_T1F, sin_T1F, config.rope.is_interleaved, rotated_THR)
        latent_THC = step.attention.attend(self.index, q_THE)
        out: LinearOutput = self.o_proj(self._values(latent_THC, step.lora).flatten(1), step.lora)
        return out

    def _absorb_keys(self, q_THK: Tensor, out_THC: Tensor, lora: LoRABatch | None) -> None:
        """Writes the queries of latent vectors to out. May overwrite q."""
        adapters = self.kv_b_proj.lora
        if lora is not None and adapters is not None:
            scale_queries(q_THK, self._key_rows, adapters, lora)
        weight_HKC = self._key_rows.part_of(self._kv_b())
        torch.bmm(q_THK.transpose(0, 1), weight_HKC, out=out_THC.transpose(0, 1))
        if lora is not None and adapters is not None:
            add_to_queries(q_THK, out_THC, self._key_rows, adapters, lora)

    def _values(self, latent_THC: Tensor, lora: LoRABatch | None) -> Tensor:
        """Returns the heads' results [T, H, V], from the sums of latent vectors that attention returns."""
        adapters, weight_HVC = self.kv_b_proj.lora, self._value_rows.part_of(self._kv_b())
        out_THV = latent_THC.new_empty(*latent_THC.shape[:2], self.config.value_dim)
        torch.bmm(latent_THC.transpose(0, 1), weight_HVC.transpose(1, 2), out=out_THV.transpose(0, 1))
        if lora is not None and adapters is not None:
            add_to_values(latent_THC, out_THV, self._value_rows, adapters, lora)
        return out_THV

    def _kv_b(self) -> Tensor:
        # A quantized weight is decoded at each step, since no quantized GEMM computes head by head.
        return self.kv_b_proj.weight.dequantized()

    def norms(self) -> dict[str, Norm]:
        """Returns the norms by their module paths below the layer."""
        q_a = {} if self.q_a_norm is None else {"self_attn.q_a_layernorm": self.q_a_norm}
        return q_a | {"self_attn.kv_a_layernorm": self.kv_a_norm}

    def packed_linears(self) -> list[PackedLinear]:
        """Returns the linears in the order of LatentAttentionConfig.packed."""
        return [self.q_proj, self.a_proj, self.kv_b_proj, self.o_proj]
