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

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lorafleet.kernels.quant.fp8 import FP8
from lorafleet.workers.attention.attention_backend import AttentionBatch, AttentionSpec, KVCache

# Costs that decide whether two sequences are joined by padding. The unit is about 4 ns, the time of one query-key pair
# of 4 heads x 32.
KEY_COST = 10  # gathering one key and value
GROUP_COST = 10_000  # the operators of one more group
GROUP_BYTES = 2 << 20  # largest gathered K; beyond the CPU's L2, 64 x 512 tokens take twice the time of four groups


class TorchAttention:
    def __init__(self, spec: AttentionSpec, caches: list[KVCache]) -> None:
        assert len(caches) == len(spec.sliding_windows)
        self._spec = spec
        self._scales = [(c.k_scale, c.v_scale) for c in caches]
        self._k_rows = [_rows(c.k_NPGD) for c in caches]
        self._v_rows = [_rows(c.v_NPGD) for c in caches]
        self._groups: list[_Group] = []
        self._group_keys = GROUP_BYTES // (spec.num_kv_heads * spec.head_dim * spec.dtype.itemsize)
        # K and V are gathered into reused memory: fresh megabytes for each layer would cost more in page faults.
        self._k_scratch = self._k_rows[0].new_empty(0, spec.head_dim)
        self._v_scratch = torch.empty_like(self._k_scratch)

    def plan(self, batch: AttentionBatch) -> None:
        starts = [0]
        for n in batch.query_lens:
            starts.append(starts[-1] + n)
        self._groups = [_Group.build(members, starts, batch, self._spec) for members in _split(batch, self._group_keys)]
        rows = max((len(g.kv_rows) for g in self._groups), default=0)
        if rows > len(self._k_scratch):
            self._k_scratch = self._k_scratch.new_empty(rows + rows // 4, self._spec.head_dim)
            self._v_scratch = torch.empty_like(self._k_scratch)

    def for_graph(self, num_seqs: int, max_context: int) -> None:  # noqa: ARG002  there is none
        return None

    def attend(self, layer: int, q_THD: Tensor, out_THD: Tensor | None = None) -> Tensor:
        if len(self._groups) == 1 and self._groups[0].is_whole_step:
            attended_THD = self._attend_group(layer, self._groups[0], q_THD)
            return attended_THD if out_THD is None else out_THD.copy_(attended_THD)
        if out_THD is None:
            out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        for group in self._groups:
            group_THD = self._attend_group(layer, group, q_THD.index_select(0, group.padded_tokens))
            if group.valid is not None:
                group_THD = group_THD.index_select(0, group.valid)
            out_THD.index_copy_(0, group.tokens, group_THD)
        return out_THD

    def _attend_group(self, layer: int, group: _Group, q_THD: Tensor) -> Tensor:
        """Returns attention for the group's B * Q padded query tokens, in their order."""
        spec, rows = self._spec, group.kv_rows
        num_kv_heads, head_dim = spec.num_kv_heads, spec.head_dim
        k = torch.index_select(self._k_rows[layer], 0, rows, out=self._k_scratch[: len(rows)])
        v = torch.index_select(self._v_rows[layer], 0, rows, out=self._v_scratch[: len(rows)])
        scale = spec.scale
        if spec.kv_dtype == FP8:
            k_scale, v_scale = self._scales[layer]
            k, v = k.view(FP8).to(spec.dtype), v.view(FP8).to(spec.dtype) * v_scale
            scale *= k_scale
        bias = group.biases[spec.sliding_windows[layer]]
        if group.query_len == 1 and spec.dtype is torch.float32:
            assert bias is not None
            heads = group.num_seqs * num_kv_heads
            q_XRD = q_THD.reshape(heads, -1, head_dim)
            k_XDL = k.view(heads, -1, head_dim).transpose(1, 2)
            if spec.softcap is None:
                scores_XRL = torch.baddbmm(bias, q_XRD, k_XDL, alpha=scale)
            else:
                scores_XRL = _capped(torch.bmm(q_XRD, k_XDL), scale, spec.softcap).add_(bias)
            return torch.bmm(scores_XRL.softmax(-1), v.view(heads, -1, head_dim)).view(q_THD.shape)
        # In half precision the scores must stay fp32, as they do in the fused operator.
        shape = (group.num_seqs, num_kv_heads, -1, head_dim)
        q_BHQD = q_THD.reshape(group.num_seqs, group.query_len, spec.num_heads, head_dim).transpose(1, 2)
        if spec.softcap is not None:
            assert bias is not None
            # The fused operator has no cap.
            q_BGXD = q_BHQD.reshape(shape).float()
            scores_BGXL = _capped(q_BGXD @ k.view(shape).float().transpose(2, 3), scale, spec.softcap)
            scores_BHQL = scores_BGXL.view(*q_BHQD.shape[:3], -1).add_(bias)
            weights_BGXL = scores_BHQL.softmax(-1).view(scores_BGXL.shape)
            out_BHQD = (weights_BGXL @ v.view(shape).float()).view(q_BHQD.shape).to(q_THD.dtype)
            return out_BHQD.transpose(1, 2).reshape(q_THD.shape)
        out_BHQD = F.scaled_dot_product_attention(
            q_BHQD,
            k.view(shape),
            v.view(shape),
            attn_mask=bias,
            is_causal=bias is None,
            scale=scale,
            enable_gqa=spec.num_heads != num_kv_heads,
        )
        return out_BHQD.transpose(1, 2).reshape(q_THD.shape)


def _capped(products: Tensor, scale: float, softcap: float) -> Tensor:
    """Returns the capped scores, in the memory of the float32 products."""
    return products.mul_(scale / softcap).tanh_().mul_(softcap)


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
    kv_rows: Tensor  # int64 [B * G * L], rows of a cache seen as [N * P * G, D]
    # Added to the scores, by distinct window: [B * G, 1, L] for the float32 decode form, else [B, 1, Q, L]. None means
    # plain causal attention of one whole prompt without a softcap.
    biases: dict[int | None, Tensor | None]

    @classmethod
    def build(cls, members: list[int], starts: list[int], batch: AttentionBatch, spec: AttentionSpec) -> _Group:
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
        row_BGL = row_BL[:, None, :] * spec.num_kv_heads + np.arange(spec.num_kv_heads)[:, None]
        padded_tokens = (np.array([starts[b] for b in members])[:, None] + query_BQ).ravel()
        valid = None
        if min(query_lens) < longest_query:
            valid = np.flatnonzero(np.arange(longest_query) < query_B1)
        tokens = padded_tokens if valid is None else padded_tokens[valid]

        position_BQ1 = (context_B1 - query_B1 + query_BQ)[:, :, None]
        biases: dict[int | None, Tensor | None] = {}
        for window in set(spec.sliding_windows):
            reach = longest_context if window is None else window
            is_whole_prompt = len(members) == 1 and longest_context == longest_query <= reach and longest_query > 1
            if is_whole_prompt and spec.softcap is None:
                biases[window] = None
                continue
            hidden_BQL = key_L > position_BQ1
            if reach < longest_context:
                hidden_BQL |= key_L <= position_BQ1 - reach
            bias_BQL = np.where(hidden_BQL, np.float32(-np.inf), np.float32(0))
            if longest_query == 1 and spec.dtype is torch.float32:
                bias = torch.from_numpy(bias_BQL.repeat(spec.num_kv_heads, axis=0))
            else:
                bias = torch.from_numpy(bias_BQL[:, None])
            biases[window] = bias.to(spec.device, spec.dtype)
        return cls(
            num_seqs=len(members),
            query_len=longest_query,
            is_whole_step=valid is None and members == list(range(len(batch.query_lens))),
            padded_tokens=torch.from_numpy(padded_tokens).to(spec.device),
            tokens=torch.from_numpy(tokens).to(spec.device),
            valid=None if valid is None else torch.from_numpy(valid).to(spec.device),
            kv_rows=torch.from_numpy(row_BGL.ravel()).to(spec.device),
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
