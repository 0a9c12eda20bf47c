"""Norms of q and k over all heads of a token together, as OLMo 2 has them.

Under tensor parallelism a token's heads are on several ranks, which exchange their rows before the norm.
"""

# T tokens · E this rank's heads of q, k and v in one row · Q this rank's heads of q, or of k, in one row

from __future__ import annotations

import torch
from torch import Tensor, nn

from lorafleet.kernels.decoder.rms_norm import rms_norm
from lorafleet.kernels.extras.affine import apply_affine
from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.lora.lora_batch import LoRABatch
from lorafleet.workers.bases.layer_config import AttentionConfig
from lorafleet.workers.bases.model_config import NormStyle
from lorafleet.workers.models.layers import Norm
from lorafleet.workers.tp.group import TPGroup


class RowNorm(nn.Module):
    """The norms of q and of k. Every rank holds the weights of all heads."""

    def __init__(
        self,
        local: AttentionConfig,
        whole: AttentionConfig,
        style: NormStyle,
        group: TPGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._group = group
        self._sizes = local.q_size, local.kv_size
        self._copies = max(1, group.size // whole.num_kv_heads)  # ranks that hold the same head of k
        self.q_norm = Norm(whole.q_size, style, dtype, device)
        self.k_norm = Norm(whole.kv_size, style, dtype, device)

    def forward(self, qkv: LinearOutput, batch: LoRABatch | None) -> LinearOutput:
        """Returns q, k and v [T, E] with q and k normed."""
        summed_TE = apply_affine(qkv)
        q_size, kv_size = self._sizes
        q_TQ, k_TQ, v_TQ = summed_TE.split((q_size, kv_size, kv_size), dim=1)
        q_TQ = self._normed(q_TQ, self.q_norm, batch, copies=1)
        k_TQ = self._normed(k_TQ, self.k_norm, batch, self._copies)
        return LinearOutput(torch.cat((q_TQ, k_TQ, v_TQ), dim=1))

    def _normed(self, part_TQ: Tensor, norm: Norm, batch: LoRABatch | None, copies: int) -> Tensor:
        weight, size = norm.for_step(batch), part_TQ.shape[1]
        if self._group.size == 1:
            return rms_norm(part_TQ.contiguous(), weight, norm.eps)
        parts_NTQ = self._group.all_gather(part_TQ.contiguous())[::copies]
        whole = rms_norm(parts_NTQ.transpose(0, 1).flatten(1).contiguous(), weight, norm.eps)
        first = self._group.rank // copies * size
        return whole[:, first : first + size]
