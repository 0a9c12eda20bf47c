"""Computes paged attention in plain torch: the CPU's serving path, and a reference that also runs on CUDA.

A tiny model's step is mostly operator overhead. The sequences of a step are therefore put into as few padded groups
as pay off, usually one group of decodes. Each layer costs five operators per group: gather K, scores with the mask as
their bias, softmax, gather V, values. K and V are gathered by head, [B, G, L, D], which suits batched GEMMs. Padding
repeats a sequence's own last token, so a group never reads another sequence's memory or unwritten memory.
Measured on 2 threads of an EPYC, with 16 decodes, G=2, H=4 and D=32: a layer with 64/128/256/512 tokens of context
takes 43/69/117/205 us, against 51/81/135/231 us for token-major gathers and
scaled_dot_product_attention(enable_gqa=True).
"""

# T tokens of the step · B sequences of a group · Q padded query tokens · L padded context
# H query heads · G KV heads · R query heads of a KV head · D head size · P block size

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lorafleet.kernels.quant.fp8 import FP8
from lorafleet.workers.attention.attention_backend import (
    AttentionBatch,
    AttentionSpec,
    DraftRows,
    KVCache,
    LayerAttention,
)

# Costs that decide whether two sequences are joined by padding. The unit is about 4 ns, the time of one query-key pair
# of 4 heads x 32.
KEY_COST = 10  # gathering one key and value
GROUP_COST = 10_000  # the operators of one more group
GROUP_BYTES = 2 << 20  # largest gathered K; beyond the CPU's L2, 64 x 512 tokens take twice the time of four groups


@dataclass(frozen=True, slots=True)
class _Layer:
    """The constants that one layer computes with."""

    attention: LayerAttention
    kind: int  # index of the layer's kind in AttentionSpec.kinds
    k_rows: Tensor  # [N * P * G, D], as _rows gives them
    v_rows: Tensor
    k_scale: float
    v_scale: float
    sinks_H: Tensor | None


class TorchAttention:
    def __init__(self, spec: AttentionSpec, caches: list[KVCache]) -> None:
        assert len(caches) == len(spec.layers)
        self._spec = spec
        self._kinds = spec.kinds
        self._layers = [
            _Layer(layer, kind, _rows(c.k_NPGD), _rows(c.v_NPGD), c.k_scale, c.v_scale, spec.sinks.get(i))
            for i, (layer, kind, c) in enumerate(zip(spec.layers, spec.kind_of_layer, caches, strict=True))
        ]
        self._groups: list[_Group] = []
        widest = max(kind.num_kv_heads * max(kind.head_dim, kind.out_dim) for kind in self._kinds)
        self._group_keys = GROUP_BYTES // (widest * spec.dtype.itemsize)
        # K and V are gathered into reused memory: fresh megabytes for each layer would cost more in page faults.
        rows = self._layers[0].k_rows
        self._k_scratch = {kind.head_dim: rows.new_empty(0, kind.head_dim) for kind in self._kinds}  # by head size
        self._v_scratch = {kind.out_dim: rows.new_empty(0, kind.out_dim) for kind in self._kinds}

    def plan(self, batch: AttentionBatch) -> None:
        starts = [0]
        for n in batch.query_lens:
            starts.append(starts[-1] + n)
        spec, kinds = self._spec, self._kinds
        self._groups = [
            _Group.build(members, starts, batch, spec, kinds) for members in _split(batch, self._group_keys)
        ]
        for index, kind in enumerate(kinds):
            rows = max((len(g.kv_rows[index]) for g in self._groups), default=0)
            for scratch, width in ((self._k_scratch, kind.head_dim), (self._v_scratch, kind.out_dim)):
                if rows > len(scratch[width]):
                    scratch[width] = scratch[width].new_empty(rows + rows // 4, width)

    def for_graph(self, num_seqs: int, max_context: int, drafts: DraftRows | None = None) -> None:  # noqa: ARG002  there is none
        return None

    def attend(self, layer: int, q_THD: Tensor, out_THD: Tensor | None = None) -> Tensor:
        own = self._layers[layer]
        if len(self._groups) == 1 and self._groups[0].is_whole_step:
            attended_THD = self._attend_group(own, self._groups[0], q_THD)
            return attended_THD if out_THD is None else out_THD.copy_(attended_THD)
        if out_THD is None:
            out_THD = q_THD.new_empty(*q_THD.shape[:2], own.attention.out_dim)
        for group in self._groups:
            group_THD = self._attend_group(own, group, q_THD.index_select(0, group.padded_tokens))
            if group.valid is not None:
                group_THD = group_THD.index_select(0, group.valid)
            out_THD.index_copy_(0, group.tokens, group_THD)
        return out_THD

    def _attend_group(self, layer: _Layer, group: _Group, q_THD: Tensor) -> Tensor:
        """Returns attention for the group's B * Q padded query tokens, in their order."""
        own, dtype, rows = layer.attention, self._spec.dtype, group.kv_rows[layer.kind]
        num_kv_heads, head_dim, out_dim = own.kv_shape
        k = torch.index_select(layer.k_rows, 0, rows, out=self._k_scratch[head_dim][: len(rows)])
        v = torch.index_select(layer.v_rows, 0, rows, out=self._v_scratch[out_dim][: len(rows)])
        scale = own.scale
        if self._spec.kv_dtype == FP8:
            k, v = k.view(FP8).to(dtype), v.view(FP8).to(dtype) * layer.v_scale
            scale *= layer.k_scale
        bias, sinks_H = group.biases[layer.kind], layer.sinks_H
        if group.query_len == 1 and dtype is torch.float32:
            assert bias is not None
            heads = group.num_seqs * num_kv_heads
            q_XRD = q_THD.reshape(heads, -1, head_dim)
            k_XDL = k.view(heads, -1, head_dim).transpose(1, 2)
            if own.softcap is None:
                scores_XRL = torch.baddbmm(bias, q_XRD, k_XDL, alpha=scale)
            else:
                scores_XRL = _scores(torch.bmm(q_XRD, k_XDL), scale, own.softcap).add_(bias)
            sinks = None if sinks_H is None else sinks_H.view(num_kv_heads, -1, 1).repeat(group.num_seqs, 1, 1)
            weights_XRL = _weights(scores_XRL, sinks)
            return torch.bmm(weights_XRL, v.view(heads, -1, out_dim)).view(*q_THD.shape[:2], out_dim)
        # In half precision the scores must stay fp32, as they do in the fused operator.
        k_BGLD = k.view(group.num_seqs, num_kv_heads, -1, head_dim)
        v_BGLD = v.view(group.num_seqs, num_kv_heads, -1, out_dim)
        q_BHQD = q_THD.reshape(group.num_seqs, group.query_len, own.num_heads, head_dim).transpose(1, 2)
        if not _is_fused(own):
            assert bias is not None
            q_BGXD = q_BHQD.reshape(group.num_seqs, num_kv_heads, -1, head_dim).float()
            scores_BGXL = _scores(q_BGXD @ k_BGLD.float().transpose(2, 3), scale, own.softcap)
            scores_BHQL = scores_BGXL.view(*q_BHQD.shape[:3], -1).add_(bias)
            weights_BHQL = _weights(scores_BHQL, None if sinks_H is None else sinks_H.view(-1, 1, 1))
            out_BGXD = weights_BHQL.view(scores_BGXL.shape) @ v_BGLD.float()
            out_BHQD = out_BGXD.view(*q_BHQD.shape[:3], out_dim).to(q_THD.dtype)
        else:
            out_BHQD = F.scaled_dot_product_attention(
                q_BHQD,
                k_BGLD,
                v_BGLD,
                attn_mask=bias,
                is_causal=bias is None,
                scale=scale,
                enable_gqa=own.num_heads != num_kv_heads,
            )
        return out_BHQD.transpose(1, 2).reshape(*q_THD.shape[:2], out_dim)


def _is_fused(layer: LayerAttention) -> bool:
    """Whether torch's fused operator can compute the layer. It has neither a cap nor sinks."""
    return layer.softcap is None and not layer.has_sinks


def _scores(products: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Returns the scaled scores, capped if the layer has a cap, in the memory of the float32 products."""
    if softcap is None:
        return products.mul_(scale)
    return products.mul_(scale / softcap).tanh_().mul_(softcap)


def _weights(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Returns the softmax of float32 scores over the last dimension. `sinks`, whose last dimension is 1, are added to
    its denominator."""
    weights = scores.softmax(-1)
    if sinks is None:
        return weights
    # exp(s) / (sum + exp(sink)) = exp(s) / sum * sigmoid(log(sum) - sink)
    return weights.mul_(torch.sigmoid(scores.logsumexp(-1, keepdim=True) - sinks.float()))


def _rows(cache_NPGD: Tensor) -> Tensor:
    """Returns the cache as rows, [N * P * G, D].

    The rows of a float8 cache are bytes, since torch cannot gather float8 rows on a CPU.
    """
    rows = cache_NPGD.view(-1, cache_NPGD.shape[3])
    return rows.view(torch.uint8) if rows.dtype == FP8 else rows


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences that are computed together, padded to the longest."""

    num_seqs: int
    query_len: int
    is_whole_step: bool
    padded_tokens: Tensor  # int64 [B * Q], index of each padded query's token in the step
    tokens: Tensor  # the same without padding
    valid: Tensor | None  # index of each of `tokens` in padded_tokens; None if there is no padding
    # The rest is by kind of layer.
    kv_rows: list[Tensor]  # int64 [B * G * L], rows of a cache seen as [N * P * G, D]
    # Added to the scores: [B * G, 1, L] for the float32 decode form, else [B, 1, Q, L]. None means plain causal
    # attention of one whole prompt that the fused operator computes.
    biases: list[Tensor | None]

    @classmethod
    def build(
        cls,
        members: list[int],
        starts: list[int],
        batch: AttentionBatch,
        spec: AttentionSpec,
        kinds: Sequence[LayerAttention],
    ) -> _Group:
        query_lens = [batch.query_lens[b] for b in members]
        context_lens = [batch.context_lens[b] for b in members]
        longest_query, longest_context = max(query_lens), max(context_lens)
        num_blocks = -(-longest_context // spec.block_size)

        # numpy's operators cost a third of torch's at these sizes.
        context_B1 = np.array(context_lens)[:, None]
        query_B1 = np.array(query_lens)[:, None]
        query_BQ = np.minimum(np.arange(longest_query), query_B1 - 1)
        key_L = np.arange(longest_context)
        tables_BN = np.zeros((len(members), num_blocks), dtype=np.int64)
        for table_N, b in zip(tables_BN, members, strict=True):
            used = batch.block_tables[b][:num_blocks]
            table_N[: len(used)] = used
        row_BL = (tables_BN[:, :, None] * spec.block_size + np.arange(spec.block_size)).reshape(len(members), -1)[
            :, :longest_context
        ]
        last_B1 = np.take_along_axis(row_BL, context_B1 - 1, axis=1)
        row_BL = np.where(key_L < context_B1, row_BL, last_B1)
        padded_tokens = (np.array([starts[b] for b in members])[:, None] + query_BQ).ravel()
        valid = None
        if min(query_lens) < longest_query:
            valid = np.flatnonzero(np.arange(longest_query) < query_B1)
        tokens = padded_tokens if valid is None else padded_tokens[valid]

        position_BQ1 = (context_B1 - query_B1 + query_BQ)[:, :, None]
        kv_rows: dict[int, Tensor] = {}
        biases: list[Tensor | None] = []
        for kind in kinds:
            if kind.num_kv_heads not in kv_rows:
                row_BGL = row_BL[:, None, :] * kind.num_kv_heads + np.arange(kind.num_kv_heads)[:, None]
                kv_rows[kind.num_kv_heads] = torch.from_numpy(row_BGL.ravel()).to(spec.device)
            reach = longest_context if kind.window is None else kind.window
            chunk = longest_context if kind.chunk is None else kind.chunk
            is_whole_prompt = len(members) == 1 and longest_context == longest_query > 1
            if is_whole_prompt and longest_context <= min(reach, chunk) and _is_fused(kind):
                biases.append(None)
                continue
            hidden_BQL = key_L > position_BQ1
            if reach < longest_context:
                hidden_BQL |= key_L <= position_BQ1 - reach
            if chunk < longest_context:
                hidden_BQL |= key_L < position_BQ1 // chunk * chunk
            bias_BQL = np.where(hidden_BQL, np.float32(-np.inf), np.float32(0))
            if longest_query == 1 and spec.dtype is torch.float32:
                bias = torch.from_numpy(bias_BQL.repeat(kind.num_kv_heads, axis=0))
            else:
                bias = torch.from_numpy(bias_BQL[:, None])
            biases.append(bias.to(spec.device, spec.dtype))
        return cls(
            num_seqs=len(members),
            query_len=longest_query,
            is_whole_step=valid is None and members == list(range(len(batch.query_lens))),
            padded_tokens=torch.from_numpy(padded_tokens).to(spec.device),
            tokens=torch.from_numpy(tokens).to(spec.device),
            valid=None if valid is None else torch.from_numpy(valid).to(spec.device),
            kv_rows=[kv_rows[kind.num_kv_heads] for kind in kinds],
            biases=biases,
        )


def _split(batch: AttentionBatch, most_keys: int) -> list[list[int]]:
    """Splits the sequences into groups that are computed together.

    Neighbors by length are joined while padding costs less than another group. A group of several sequences has at
    most most_keys padded keys.
    """

    def cost(query_len: int, context_len: int) -> int:
        return context_len * (KEY_COST + query_len)

    by_length = sorted(range(len(batch.query_lens)), key=lambda b: (batch.query_lens[b], batch.context_lens[b]))
    groups: list[list[int]] = []
    widest = 0  # longest context of the open group, whose last sequence has its longest query
    for b in by_length:
        query_len, context_len = batch.query_lens[b], batch.context_lens[b]
        if groups:
            group = groups[-1]
            joined = (len(group) + 1) * cost(query_len, max(widest, context_len))
            apart = len(group) * cost(batch.query_lens[group[-1]], widest) + cost(query_len, context_len) + GROUP_COST
            if joined <= apart and (len(group) + 1) * max(widest, context_len) <= most_keys:
                group.append(b)
                widest = max(widest, context_len)
                continue
        groups.append([b])
        widest = context_len
    return [sorted(group) for group in groups]
