"""Random paged batches for the attention tests, and the naive attention that they are compared with."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

PAGE = 16
# Each: (query tokens, context with them) of every sequence.
BATCHES: dict[str, list[tuple[int, int]]] = {
    "one_token": [(1, 1)],
    "decodes": [(1, 5), (1, 16), (1, 17), (1, 100), (1, 63)],
    "like_decodes": [(1, 33), (1, 34), (1, 31)],
    "long_decodes": [(1, 1300), (1, 512), (1, 513), (1, 3)],
    "prefills": [(5, 5), (40, 40), (16, 16)],
    "equal_prefills": [(24, 24)] * 3,
    "chunk": [(16, 77)],
    "decodes_first": [(1, 9), (1, 700), (1, 33), (30, 30), (16, 77), (1, 5)],
    "mixed": [(1, 9), (30, 30), (1, 700), (3, 50), (67, 131), (1, 1), (2, 2)],
}
WINDOW = 11
HEADS = {"gqa": (4, 2), "mha": (2, 2), "mqa": (4, 1), "odd_group": (6, 2)}


@dataclass(frozen=True, slots=True)
class PagedCase:
    """A batch whose past is in the cache and whose new tokens are not yet. Blocks nobody owns hold NaN."""

    query_lens: list[int]
    context_lens: list[int]
    block_tables: list[list[int]]
    k_NPGD: Tensor
    v_NPGD: Tensor
    q_THD: Tensor
    k_TGD: Tensor
    v_TGD: Tensor
    slot_mapping_T: Tensor
    past: list[tuple[Tensor, Tensor]] = field(repr=False)  # each sequence's keys and values, all of its context

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    def write_new_tokens(self) -> None:
        for cache_NPGD, new_TGD in ((self.k_NPGD, self.k_TGD), (self.v_NPGD, self.v_TGD)):
            cache_NPGD.view(-1, *new_TGD.shape[1:])[self.slot_mapping_T] = new_TGD


def make_case(
    lens: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    device: str = "cpu",
    value_dim: int | None = None,
) -> PagedCase:
    rng = random.Random(len(lens))
    generator = torch.Generator().manual_seed(len(lens))
    num_heads, kv_heads = heads
    value_dim = head_dim if value_dim is None else value_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    counts = [-(-context // PAGE) for _, context in lens]
    free = list(range(sum(counts) + 3))
    rng.shuffle(free)
    tables = [[free.pop() for _ in range(count)] for count in counts]
    caches = [torch.full((sum(counts) + 3, PAGE, kv_heads, d), torch.nan, dtype=dtype) for d in (head_dim, value_dim)]
    k_rows, v_rows = (cache.view(-1, *cache.shape[2:]) for cache in caches)
    slots: list[int] = []
    new_k, new_v, past = [], [], []
    for (query, context), table in zip(lens, tables, strict=True):
        where = [table[i // PAGE] * PAGE + i % PAGE for i in range(context)]
        k, v = normal(context, kv_heads, head_dim), normal(context, kv_heads, value_dim)
        old = where[: context - query]
        k_rows[old], v_rows[old] = k[: context - query], v[: context - query]
        slots += where[context - query :]
        new_k.append(k[context - query :])
        new_v.append(v[context - query :])
        past.append((k.to(device), v.to(device)))
    return PagedCase(
        query_lens=[query for query, _ in lens],
        context_lens=[context for _, context in lens],
        block_tables=tables,
        k_NPGD=caches[0].to(device),
        v_NPGD=caches[1].to(device),
        q_THD=normal(len(slots), num_heads, head_dim).to(device),
        k_TGD=torch.cat(new_k).to(device),
        v_TGD=torch.cat(new_v).to(device),
        slot_mapping_T=torch.tensor(slots).to(device),
        past=past,
    )


def in_fp8(case: PagedCase, k_scale: float, v_scale: float, unused: float = torch.nan) -> PagedCase:
    """The same past in caches of e4m3, as far as they can hold it. Unused rows hold `unused`."""

    def rounded(x: Tensor, scale: float) -> Tensor:
        # The cast makes NaN of larger numbers.
        return (x.float() / scale).clamp(-448, 448).nan_to_num(unused).to(torch.float8_e4m3fn)

    past = [(rounded(k, k_scale).double() * k_scale, rounded(v, v_scale).double() * v_scale) for k, v in case.past]
    return replace(case, k_NPGD=rounded(case.k_NPGD, k_scale), v_NPGD=rounded(case.v_NPGD, v_scale), past=past)


def naive_attention(
    case: PagedCase,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    chunk: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """All scores in float64 from the sequences' own keys: knows nothing of blocks."""
    outs = []
    for (k, v), q, context in zip(case.past, case.q_THD.split(case.query_lens), case.context_lens, strict=True):
        group = q.shape[1] // k.shape[1]
        k_LHD, v_LHD = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
        position_Q1 = torch.arange(context - len(q), context, device=q.device)[:, None]
        key_L = torch.arange(context, device=q.device)
        seen_QL = (key_L <= position_Q1) & (key_L > position_Q1 - (window or context))
        if chunk is not None:
            seen_QL &= key_L // chunk == position_Q1 // chunk
        scores_HQL = torch.einsum("qhd,lhd->hql", q.double(), k_LHD) * scale
        if softcap is not None:
            scores_HQL = softcap * (scores_HQL / softcap).tanh()
        sums_HQL = scores_HQL.masked_fill(~seen_QL, -torch.inf).exp()
        sink_H11 = 0.0 if sinks_H is None else sinks_H.double().exp()[:, None, None]
        weights_HQL = sums_HQL / (sums_HQL.sum(-1, keepdim=True) + sink_H11)
        outs.append(torch.einsum("hql,lhd->qhd", weights_HQL, v_LHD))
    return torch.cat(outs)
