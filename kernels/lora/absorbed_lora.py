"""The adapters' share in kv_b_proj of latent attention, whose weight is absorbed.

kv_b_proj maps a cached latent vector c to every head's key and value. Its rows of head h are W_K (the key's) and W_V.
The weight is never applied to the cache. Instead

- the query takes it over: q . (W_K c) = (W_K^T q) . c, and
- the result does: sum of w (W_V c) = W_V (sum of w c).

An adapter changes W_K to g_K (W_K + s B_K A), where g_K scales rows, and likewise W_V. W_K^T q becomes
W_K^T (g_K q) + s A^T (B_K^T (g_K q)). A bias of the key adds the same to all scores of a query, which changes no
softmax, and a bias of the value is added to the result, since the weights of a softmax sum to one. All tokens that a
query sees must use the query's adapter, which activated LoRAs do not ensure.

Each token has its own adapter. On CUDA the launches are those of any mix, so graphs may contain them:
kernels/lora/absorbed_lora_triton.py.
"""

# T tokens · H this rank's heads · K numbers of a head's key · V of its value · N either of the two
# C latent size · R rank

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lorafleet.kernels.lora.lora_batch import LoRABatch
from lorafleet.kernels.lora.packed_lora import PackedLoRA
from lorafleet.kernels.quant.fp8 import FP8


@dataclass(frozen=True, slots=True)
class HeadRows:
    """The rows of kv_b_proj that give each head's key, or its value."""

    of_head: int  # K + V, the rows of a head
    first: int
    count: int  # K or V

    def part_of(self, whole: Tensor) -> Tensor:
        """Returns these rows of all heads, [H, N, ...], from a tensor [H * (K + V), ...]."""
        by_head: Tensor = whole.unflatten(0, (-1, self.of_head))
        return by_head[:, self.first : self.first + self.count]


def scale_queries(q_THK: Tensor, rows: HeadRows, packed: PackedLoRA, batch: LoRABatch) -> None:
    """Multiplies each token's query by g_K in place, before W_K and the adapter's share are applied."""
    _apply_affine(q_THK, rows, packed, batch, has_bias=False)


def add_to_queries(q_THK: Tensor, out_THC: Tensor, rows: HeadRows, packed: PackedLoRA, batch: LoRABatch) -> None:
    """Adds s A^T (B_K^T q) to out in place. Both may be parts of wider tensors."""
    if q_THK.is_cuda:
        from lorafleet.kernels.lora.absorbed_lora_triton import add_absorbed  # triton is optional on a CPU

        add_absorbed(q_THK, out_THC, rows.of_head, rows.first, packed, batch, starts_with_b=True)
        return
    for tokens, a_RC, b_HNR in _adapters(rows, packed, batch):
        q_HTK = q_THK[tokens].transpose(0, 1).to(a_RC.dtype)
        out_THC[tokens] += ((q_HTK @ b_HNR) @ a_RC).transpose(0, 1).to(out_THC.dtype)


def add_to_values(latent_THC: Tensor, out_THV: Tensor, rows: HeadRows, packed: PackedLoRA, batch: LoRABatch) -> None:
    """Adds s B_V (A latent) to out in place, and applies g_V and the bias to the sum."""
    if latent_THC.is_cuda:
        from lorafleet.kernels.lora.absorbed_lora_triton import add_absorbed

        add_absorbed(latent_THC, out_THV, rows.of_head, rows.first, packed, batch, starts_with_b=False)
    else:
        for tokens, a_RC, b_HNR in _adapters(rows, packed, batch):
            latent_HTC = latent_THC[tokens].transpose(0, 1).to(a_RC.dtype)
            delta_HTV = (latent_HTC @ a_RC.T) @ b_HNR.transpose(1, 2)
            out_THV[tokens] += delta_HTV.transpose(0, 1).to(out_THV.dtype)
    _apply_affine(out_THV, rows, packed, batch, has_bias=True)


def _adapters(rows: HeadRows, packed: PackedLoRA, batch: LoRABatch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields the tokens of each adapter of the step, its scaled A and the heads' rows of its B."""
    for slot, (start, end) in zip(batch.slots, batch.spans, strict=True):
        weights = packed.slots[slot]
        if weights is None or weights.b[0] is None:
            continue
        dtype = torch.float32 if weights.a_RD.dtype == FP8 else weights.a_RD.dtype
        scale = weights.scale(0, slice(None))
        scale_R1 = scale.unsqueeze(1) if isinstance(scale, Tensor) else scale
        yield batch.order_T[start:end], weights.a_RD.to(dtype) * scale_R1, rows.part_of(weights.b[0].to(dtype))


def _apply_affine(x_THN: Tensor, rows: HeadRows, packed: PackedLoRA, batch: LoRABatch, has_bias: bool) -> None:
    if x_THN.is_cuda:
        from lorafleet.kernels.lora.absorbed_lora_triton import apply_head_affine

        apply_head_affine(x_THN, rows.of_head, rows.first, batch.addresses.affine(packed.index), has_bias)
        return
    for slot, (start, end) in zip(batch.slots, batch.spans, strict=True):
        extras, tokens = packed.extras[slot], batch.order_T[start:end]
        if extras is None:
            continue
        own_THN = x_THN[tokens].float()
        if extras.scale_O is not None:
            own_THN *= rows.part_of(extras.scale_O)
        if has_bias and extras.bias_O is not None:
            own_THN += rows.part_of(extras.bias_O)
        x_THN[tokens] = own_THN.to(x_THN.dtype)
