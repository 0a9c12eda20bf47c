"""The kernels that compute captured decodes of many sequences, beside FlashInfer's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from lorafleet.kernels.quant.fp8 import FP8
from lorafleet.workers.attention import own_decodes, select
from lorafleet.workers.attention.attention_backend import (
    AttentionBatch,
    AttentionSpec,
    DraftRows,
    KVCache,
    LayerAttention,
)
from lorafleet.workers.attention.own_decodes import OwnDecodes, least_own_seqs, with_own_decodes
from lorafleet.workers.attention.select import make_attention
from lorafleet.workers.attention.torch_backend import TorchAttention
from lorafleet.workers.attention.triton_decodes import TritonDecodes
from tests.kernels.attention_cases import PAGE, make_case, naive_attention

LAYER = LayerAttention(num_heads=16, num_kv_heads=8, head_dim=128, scale=128**-0.5)
SPEC = AttentionSpec((LAYER,), PAGE, torch.bfloat16, torch.bfloat16, torch.device("cpu"))


def caches(spec: AttentionSpec, num_blocks: int = 1) -> list[KVCache]:
    shape = num_blocks, PAGE, LAYER.num_kv_heads, LAYER.head_dim
    return [KVCache(*(torch.zeros(*shape, dtype=spec.dtype, device=spec.device) for _ in "kv")) for _ in spec.layers]


class FlashInfer:
    """Stands for FlashInfer's backend."""

    def __init__(self) -> None:
        self.planned: list[AttentionBatch] = []

    def plan(self, batch: AttentionBatch) -> None:
        self.planned.append(batch)

    def for_graph(self, num_seqs: int, max_context: int, drafts: DraftRows | None = None) -> FlashInfer | None:
        assert drafts is None, "FlashInfer has no graphs with drafts"
        return None if (num_seqs, max_context) == (1, 7) else self

    def attend(self, layer: int, q_THD: torch.Tensor, out_THD: torch.Tensor | None = None) -> torch.Tensor:
        return q_THD + layer if out_THD is None else out_THD


@pytest.mark.parametrize(("kv_heads", "least"), [(8, 192), (2, 768), (5, 308)])
def test_only_captured_decodes_of_many_sequences_are_our_own(kv_heads: int, least: int) -> None:
    inner = FlashInfer()
    spec = replace(SPEC, layers=(replace(LAYER, num_heads=kv_heads, num_kv_heads=kv_heads), LAYER))
    assert least_own_seqs(spec, (9, 0)) == least
    backend = OwnDecodes(inner, spec, caches(spec), least)
    assert isinstance(backend.for_graph(least, 64), TritonDecodes)
    assert backend.for_graph(least - 1, 64) is inner
    assert backend.for_graph(1, 7) is None
    assert isinstance(backend.for_graph(2, 64, DraftRows(5, 10)), TritonDecodes)
    batch = AttentionBatch([1], [1], [[0]])
    backend.plan(batch)
    assert inner.planned == [batch]
    q = torch.ones(2, 8, 128)
    assert torch.equal(backend.attend(3, q), q + 3)
    assert backend.attend(0, q, q) is q


@pytest.mark.parametrize(
    ("spec", "capability", "is_own"),
    [
        (SPEC, (9, 0), True),
        (SPEC, (8, 0), False),
        (replace(SPEC, kv_dtype=FP8), (9, 0), False),
        (replace(SPEC, layers=(LAYER, replace(LAYER, window=64))), (9, 0), False),
        (replace(SPEC, layers=(replace(LAYER, softcap=3.0),)), (9, 0), False),
        (replace(SPEC, layers=(replace(LAYER, head_dim=64),)), (9, 0), False),
        (replace(SPEC, layers=(replace(LAYER, num_heads=128),)), (9, 0), False),
    ],
)
def test_what_is_not_measured_stays_with_flashinfer_unless_it_has_drafts(
    monkeypatch: pytest.MonkeyPatch, spec: AttentionSpec, capability: tuple[int, int], is_own: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    inner = FlashInfer()
    backend = with_own_decodes(inner, spec, caches(spec))
    assert isinstance(backend.for_graph(1000, 64), TritonDecodes) == is_own
    assert (backend.for_graph(1000, 64) is inner) != is_own
    assert isinstance(backend.for_graph(1, 64, DraftRows(5, 5)), TritonDecodes)


@pytest.mark.parametrize("name", ["auto", "flashinfer"])
def test_a_backend_requested_by_name_computes_everything(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(select.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(select, "_make", lambda *_: TorchAttention(SPEC, caches(SPEC)))

    class Own(OwnDecodes):
        def __init__(self, *_: object) -> None:
            self.least_seqs = 7

    monkeypatch.setattr(own_decodes, "OwnDecodes", Own)
    spec = replace(SPEC, device=torch.device("cuda"))
    backend = make_attention(spec, caches(SPEC), name)  # type: ignore[arg-type]  # parametrize loses the literal
    assert isinstance(backend, Own) == (name == "auto")


class TestOnGPU:
    pytestmark = pytest.mark.gpu

    def test_graph_of_many_sequences_answers_for_each_new_batch(self) -> None:
        spec = replace(SPEC, device=torch.device("cuda"))
        count = 195
        lengths = [[1 + (37 * i * i) % longest for i in range(count)] for longest in (40, 900, 1)]
        cases = [make_case([(1, c) for c in lens], (16, 8), 128, spec.dtype, "cuda") for lens in lengths]
        for case in cases:
            case.write_new_tokens()
        [cache] = caches(spec, max(len(case.k_NPGD) for case in cases))
        backend = OwnDecodes(FlashInfer(), spec, [cache], count).for_graph(count, 1024)
        assert backend is not None
        backend.plan(AttentionBatch([1] * count, [1] * count, [[0]] * count))
        q_THD = cases[0].q_THD.clone()
        backend.attend(0, q_THD)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = backend.attend(0, q_THD)
        for case in cases:
            cache.k_NPGD[: len(case.k_NPGD)], cache.v_NPGD[: len(case.v_NPGD)] = case.k_NPGD, case.v_NPGD
            q_THD.copy_(case.q_THD)
            backend.plan(AttentionBatch(case.query_lens, case.context_lens, case.block_tables))
            graph.replay()
            torch.testing.assert_close(out.double(), naive_attention(case, LAYER.scale, None), atol=2e-2, rtol=2e-2)
