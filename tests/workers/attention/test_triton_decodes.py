"""Decodes of the Triton backend in captured steps: plans of fixed shapes in fixed memory, and replays."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from lorafleet.workers.attention.attention_backend import (
    AttentionBatch,
    AttentionSpec,
    DraftRows,
    KVCache,
    LayerAttention,
)
from lorafleet.workers.attention.triton_backend import TritonAttention
from lorafleet.workers.attention.triton_decodes import DecodeLayers, TritonDecodes
from tests.kernels.attention_cases import PAGE, PagedCase, make_case, naive_attention
from tests.workers.attention.test_layer_kinds import sinks_of

FULL = LayerAttention(num_heads=8, num_kv_heads=2, head_dim=64, scale=0.125)
LAYERS = (
    FULL,
    replace(FULL, window=128, has_sinks=True),
    replace(FULL, chunk=512, softcap=3.0),
    replace(FULL, window=40, cache_layer=0),
    LayerAttention(num_heads=16, num_kv_heads=2, head_dim=512, scale=0.05),
    LayerAttention(num_heads=20, num_kv_heads=1, head_dim=576, scale=0.05, value_dim=512, values_in_keys=True),
)
CONTEXTS = [[5, 16, 17, 100, 63], [1300, 512, 1, 513, 3], [1, 1, 1, 1, 1], [6, 2000, 18, 101, 64]]
LONGEST = 2048


def make_spec(device: str, dtype: torch.dtype) -> AttentionSpec:
    return AttentionSpec(LAYERS, PAGE, dtype, dtype, torch.device(device), sinks_of(LAYERS, device))


def empty_caches(spec: AttentionSpec, num_blocks: int) -> list[KVCache]:
    caches: list[KVCache] = []
    for layer in spec.layers:
        if layer.cache_layer is not None:
            caches.append(caches[layer.cache_layer])
            continue
        shape = num_blocks, PAGE, layer.num_kv_heads
        k_NPGD = torch.zeros(*shape, layer.head_dim, dtype=spec.dtype, device=spec.device)
        v_NPGD = k_NPGD[..., : layer.out_dim] if layer.values_in_keys else torch.zeros_like(k_NPGD)
        caches.append(KVCache(k_NPGD, v_NPGD))
    return caches


def tables_of(contexts: list[int]) -> list[array[int]]:
    """Blocks with another one behind them that is not filled yet."""
    counts = [-(-length // PAGE) for length in contexts]
    starts = [sum(counts[:b]) for b in range(len(counts))]
    return [array("i", [*range(s, s + n), 10**6]) for s, n in zip(starts, counts, strict=True)]


def test_plans_of_a_captured_step_have_one_shape_and_one_place() -> None:
    spec = make_spec("cpu", torch.float32)
    backend = TritonAttention(spec, empty_caches(spec, 1)).for_graph(5, LONGEST)
    batches = backend._batches
    seen = [(part.data_ptr(), part.shape) for batch in batches for part in (batch.spans_S5, batch.merges_M3)]
    for contexts in CONTEXTS:
        backend.plan(AttentionBatch([1] * 5, contexts, tables_of(contexts)))
        assert backend._batches is batches
        fresh = TritonDecodes(DecodeLayers.of(spec, empty_caches(spec, 1)))
        fresh.plan(AttentionBatch([1] * 5, contexts, tables_of(contexts)))
        for batch, other in zip(batches, fresh._batches, strict=True):
            assert torch.equal(batch.spans_S5, other.spans_S5)
            assert torch.equal(batch.merges_M3, other.merges_M3)
            assert torch.equal(batch.blocks[: len(other.blocks)], other.blocks)
            assert 10**6 not in other.blocks
    assert seen == [(part.data_ptr(), part.shape) for batch in batches for part in (batch.spans_S5, batch.merges_M3)]
    longest = [LONGEST] * 5
    backend.plan(AttentionBatch([1] * 5, longest, tables_of(longest)))  # it has room for that


def test_graphs_of_all_sizes_share_memory_and_the_workspace() -> None:
    spec = make_spec("cpu", torch.float32)
    attention = TritonAttention(spec, empty_caches(spec, 1))
    large, small = attention.for_graph(64, LONGEST), attention.for_graph(2, LONGEST)
    assert large._batches[0].spans_S5.data_ptr() == small._batches[0].spans_S5.data_ptr()
    assert large._layers.workspace is small._layers.workspace


def test_plans_of_drafts_say_which_rows_each_sequence_has() -> None:
    spec = make_spec("cpu", torch.float32)
    attention = TritonAttention(spec, empty_caches(spec, 1))
    backend = attention.for_graph(6, LONGEST, DraftRows(4, 16))
    contexts = [*CONTEXTS[1], 1]
    for query_lens in ([1, 4, 1, 3, 2, 0], [2, 1, 1, 1, 1, 0]):  # the last one is padding
        backend.plan(AttentionBatch(query_lens, contexts, tables_of(contexts)))
        firsts = [sum(query_lens[:b]) for b in range(6)]
        for batch in backend._batches:
            assert batch.rows_B3 is not None
            assert batch.rows_B3.tolist() == [list(rows) for rows in zip(firsts, query_lens, contexts, strict=True)]
    assert attention.for_graph(3, LONGEST, DraftRows(4, 8))._layers is backend._layers
    assert attention.for_graph(3, LONGEST)._layers is not backend._layers


class TestOnGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_graph_answers_for_each_new_batch(self, dtype: torch.dtype) -> None:
        spec = make_spec("cuda", dtype)
        count = len(CONTEXTS[0])
        caches = empty_caches(spec, max(sum(-(-c // PAGE) for c in lens) for lens in CONTEXTS) + 3)
        attention = TritonAttention(spec, caches)
        backend = attention.for_graph(count, LONGEST)
        queries = [torch.zeros(count, own.num_heads, own.head_dim, dtype=dtype, device="cuda") for own in LAYERS]
        backend.plan(AttentionBatch([1] * count, [1] * count, [[0]] * count))
        for layer, q_THD in enumerate(queries):
            backend.attend(layer, q_THD)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [backend.attend(layer, q_THD) for layer, q_THD in enumerate(queries)]
        for contexts in CONTEXTS:
            cases = self.fill(spec, caches, [(1, c) for c in contexts], queries)
            batch = AttentionBatch([1] * count, contexts, cases[0].block_tables)
            backend.plan(batch)
            graph.replay()
            attention.plan(batch)
            for layer, (own, case, out) in enumerate(zip(LAYERS, cases, outs, strict=True)):
                want = naive_attention(case, own.scale, own.window, own.softcap, own.chunk, spec.sinks.get(layer))
                torch.testing.assert_close(out.double(), want, atol=2e-2, rtol=2e-2)
                assert torch.equal(out, attention.attend(layer, queries[layer]))

    def test_graph_with_drafts_answers_for_each_new_batch(self) -> None:
        spec = make_spec("cuda", torch.bfloat16)
        caches = empty_caches(spec, max(sum(-(-c // PAGE) for c in lens) for lens in CONTEXTS) + 3)
        total, rows = 16, [[1, 4, 3, 2, 4], [1, 4, 1, 3, 2], [1, 1, 1, 1, 1], [4, 1, 4, 4, 1]]
        backend = TritonAttention(spec, caches).for_graph(6, LONGEST, DraftRows(4, total))
        queries = [torch.zeros(total, own.num_heads, own.head_dim, dtype=spec.dtype, device="cuda") for own in LAYERS]
        outs = [torch.zeros(total, own.num_heads, own.out_dim, dtype=spec.dtype, device="cuda") for own in LAYERS]
        backend.plan(AttentionBatch([1] * 6, [1] * 6, [[0]] * 6))

        def attend() -> None:
            for layer, (q_THD, out_THD) in enumerate(zip(queries, outs, strict=True)):
                out_THD.copy_(backend.attend(layer, q_THD))

        attend()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attend()
        for query_lens, contexts in zip(rows, CONTEXTS, strict=True):
            lens = list(zip(query_lens, contexts, strict=True))
            cases = self.fill(spec, caches, lens, [q_THD[: sum(query_lens)] for q_THD in queries])
            tables = [*cases[0].block_tables, [0]]
            backend.plan(AttentionBatch([*query_lens, 0], [*contexts, 1], tables))
            graph.replay()
            for layer, (own, case, out) in enumerate(zip(LAYERS, cases, outs, strict=True)):
                want = naive_attention(case, own.scale, own.window, own.softcap, own.chunk, spec.sinks.get(layer))
                torch.testing.assert_close(out[: len(want)].double(), want, atol=2e-2, rtol=2e-2)
                assert out.isfinite().all()

    def test_plan_of_a_captured_step_does_not_wait_for_the_device(self) -> None:
        spec = make_spec("cuda", torch.bfloat16)
        backend = TritonAttention(spec, empty_caches(spec, 1)).for_graph(5, LONGEST)
        batch = AttentionBatch([1] * 5, CONTEXTS[1], tables_of(CONTEXTS[1]))
        backend.plan(batch)
        torch.cuda.synchronize()
        done = torch.cuda.Event()
        torch.cuda._sleep(400_000_000)  # a fifth of a second
        done.record()
        backend.plan(batch)
        assert not done.query()

    @staticmethod
    def fill(
        spec: AttentionSpec, caches: list[KVCache], lens: list[tuple[int, int]], queries: list[torch.Tensor]
    ) -> list[PagedCase]:
        """Fills the caches and queries with a random case for each layer."""
        cases: list[PagedCase] = []
        for own, cache, q_THD in zip(spec.layers, caches, queries, strict=True):
            heads = own.num_heads, own.num_kv_heads
            case = make_case(lens, heads, own.head_dim, spec.dtype, "cuda", own.value_dim)
            if own.cache_layer is not None:
                case = replace(cases[own.cache_layer], q_THD=case.q_THD)
            elif own.values_in_keys:
                past = [(k, k[..., : own.out_dim]) for k, _ in case.past]
                case = replace(case, v_NPGD=cache.v_NPGD, v_TGD=case.k_TGD[..., : own.out_dim], past=past)
            if own.cache_layer is None:
                case = replace(case, k_NPGD=_into(cache.k_NPGD, case.k_NPGD))
                if not own.values_in_keys:
                    case = replace(case, v_NPGD=_into(cache.v_NPGD, case.v_NPGD))
                case.write_new_tokens()
            q_THD.copy_(case.q_THD)
            cases.append(case)
        return cases


def _into(cache: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    cache[: len(values)] = values
    return cache
