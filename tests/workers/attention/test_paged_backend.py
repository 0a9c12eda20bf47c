"""Attention by one kernel gives a query the same bits in a prompt, in its chunks, in a decode and in a captured
step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lorafleet.workers.attention.attention_backend import AttentionBatch, AttentionSpec, KVCache, LayerAttention
from lorafleet.workers.attention.paged_backend import PagedAttention
from tests.kernels.attention_cases import PAGE, PagedCase, make_case, naive_attention
from tests.kernels.harness import run_interpreted

LENGTH, OTHER = 39, 20
KINDS: list[dict[str, Any]] = [{}, {"window": 19, "has_sinks": True}, {"chunk": 16, "softcap": 3.0}]


def check(dtype: torch.dtype, device: str, head_dim: int, tolerance: float) -> None:
    case = make_case([(LENGTH, LENGTH), (OTHER, OTHER)], (4, 2), head_dim, dtype, device)
    case.write_new_tokens()
    for kind in KINDS:
        layer = LayerAttention(4, 2, head_dim, head_dim**-0.5, **kind)
        sinks = {0: torch.linspace(-1, 1, 4, device=device)} if layer.has_sinks else {}
        spec = AttentionSpec((layer,), PAGE, dtype, dtype, torch.device(device), sinks)
        attention = PagedAttention(spec, [KVCache(case.k_NPGD, case.v_NPGD)])
        whole = attend(attention, case, LENGTH, LENGTH)
        want = naive_attention(case, layer.scale, layer.window, layer.softcap, layer.chunk, sinks.get(0))[:LENGTH]
        torch.testing.assert_close(whole.double(), want.double(), atol=tolerance, rtol=tolerance)
        others = [(1, 17), (7, 20)]
        for start, end, company in ((0, 33, []), (33, 39, others), (17, 18, []), (38, 39, others)):
            assert torch.equal(attend(attention, case, end - start, end, company), whole[start:end]), (kind, start, end)
        captured = attention.for_graph(3, 100)
        first, second = case.block_tables
        for context in (39, 1):
            captured.plan(AttentionBatch([1] * 3, [20, context, 2], [second, first, second]))
            queries = torch.stack((case.q_THD[LENGTH + 19], case.q_THD[context - 1], case.q_THD[LENGTH + 1]))
            assert torch.equal(captured.attend(0, queries)[1], whole[context - 1])


def attend(
    attention: PagedAttention, case: PagedCase, query: int, context: int, others: Sequence[tuple[int, int]] = ()
) -> Tensor:
    """Returns the first sequence's part of a step with parts of the second around it."""
    first, second = case.block_tables
    lens = [*others, (query, context), *others]
    tables = [*[second] * len(others), first, *[second] * len(others)]
    attention.plan(AttentionBatch([n for n, _ in lens], [n for _, n in lens], tables))
    beside = [case.q_THD[LENGTH + end - n : LENGTH + end] for n, end in others]
    own = case.q_THD[context - query : context]
    return attention.attend(0, torch.cat((*beside, own, *beside)))[sum(n for n, _ in others) :][:query]


def test_interpreted_kernel() -> None:
    run_interpreted("""
        from tests.kernels.interpreter import add_in_order
        from tests.workers.attention.test_paged_backend import check

        add_in_order()
        check(torch.float32, "cpu", 16, 1e-5)
    """)


class TestOnGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("head_dim", [64, 128])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    def test_compiled_kernel(self, dtype: torch.dtype, head_dim: int) -> None:
        check(dtype, "cuda", head_dim, 2e-2 if dtype is torch.bfloat16 else 1e-4)
