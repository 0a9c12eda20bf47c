from __future__ import annotations

import importlib.util
from array import array

import pytest
import torch

from lorafleet.kernels.quant.fp8 import FP8
from lorafleet.workers.attention.attention_backend import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    KVCache,
    LayerAttention,
)
from lorafleet.workers.attention.flashinfer_backend import FlashInferAttention
from lorafleet.workers.attention.torch_backend import TorchAttention, _split
from lorafleet.workers.attention.xqa_attention import xqa_refusal
from tests.kernels.attention_cases import BATCHES, HEADS, PAGE, WINDOW, in_fp8, make_case, naive_attention
from tests.workers.attention.xqa_kernels import compile_xqa

needs_flashinfer = pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="needs flashinfer")
# FlashInfer's XQA rounds queries and weights to e4m3, which makes errors of up to 0.055 here (computed in float64).
XQA_TOLERANCE = 0.1
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
CONTEXTS = [[5, 16, 17, 100, 63], [1300, 512, 1, 513, 3], [6, 17, 18, 101, 64]]
KV_SCALES = (0.03, 0.01)
LAYER_WINDOWS = {"full": (None, None), "window": (WINDOW, WINDOW), "window_by_layer": (None, WINDOW)}


def make_spec(
    heads: tuple[int, int],
    windows: tuple[int | None, ...],
    head_dim: int,
    dtype: torch.dtype,
    device: str,
    kv_dtype: torch.dtype | None = None,
    softcap: float | None = None,
) -> AttentionSpec:
    """Scores are made so large that a cap counts."""
    scale = (1.3 if softcap is None else softcap) * head_dim**-0.5
    return AttentionSpec(
        layers=tuple(LayerAttention(*heads, head_dim, scale, window, softcap=softcap) for window in windows),
        block_size=PAGE,
        dtype=dtype,
        kv_dtype=kv_dtype or dtype,
        device=torch.device(device),
    )


def check_batch(
    make: type[AttentionBackend],
    spec: AttentionSpec,
    lens: list[tuple[int, int]],
    unused: float = torch.nan,
    decode_tolerance: float | None = None,
) -> None:
    """Every layer has the same past, so only its window tells its answer apart.

    Args:
        unused: What an FP8 cache holds in rows that must not be seen.
        decode_tolerance: Of the decodes at the front, if theirs is another one.
    """
    first = spec.layers[0]
    heads = first.num_heads, first.num_kv_heads
    case = make_case(lens, heads, first.head_dim, spec.dtype, spec.device.type)
    case.write_new_tokens()
    scales = (1.0, 1.0)
    if spec.kv_dtype == FP8:
        scales = KV_SCALES
        case = in_fp8(case, *scales, unused)
    caches = [KVCache(case.k_NPGD.clone(), case.v_NPGD.clone(), *scales) for _ in spec.layers]
    backend = make(spec, caches)
    backend.plan(AttentionBatch(case.query_lens, case.context_lens, case.block_tables))
    tolerance = TOLERANCE[spec.dtype]
    for layer, own in enumerate(spec.layers):
        out = backend.attend(layer, case.q_THD)
        assert out.dtype == spec.dtype
        assert out.shape == case.q_THD.shape
        want = naive_attention(case, own.scale, own.window, own.softcap)
        count = 0
        if decode_tolerance is not None:
            count = next((i for i, length in enumerate(case.query_lens) if length > 1), len(case.query_lens))
            torch.testing.assert_close(out[:count].double(), want[:count], atol=decode_tolerance, rtol=decode_tolerance)
        torch.testing.assert_close(out[count:].double(), want[count:], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("windows", LAYER_WINDOWS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", BATCHES)
def test_torch_equals_naive_attention(name: str, heads: str, windows: str) -> None:
    spec = make_spec(HEADS[heads], LAYER_WINDOWS[windows], 24, torch.float32, "cpu")
    check_batch(TorchAttention, spec, BATCHES[name])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", BATCHES)
def test_torch_in_half_precision(name: str, dtype: torch.dtype) -> None:
    check_batch(TorchAttention, make_spec((4, 2), (None, WINDOW), 32, dtype, "cpu"), BATCHES[name])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", BATCHES)
def test_torch_over_an_fp8_cache(name: str, dtype: torch.dtype) -> None:
    check_batch(TorchAttention, make_spec((4, 2), (None, WINDOW), 32, dtype, "cpu", FP8), BATCHES[name])


@pytest.mark.parametrize("kv_dtype", [None, FP8], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", BATCHES)
def test_torch_caps_scores(name: str, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    check_batch(TorchAttention, make_spec((4, 2), (None, WINDOW), 24, dtype, "cpu", kv_dtype, 3.0), BATCHES[name])


def test_torch_takes_one_backend_through_many_steps() -> None:
    """Scratch memory grows and is reused; nothing of an earlier step may leak into a later one."""
    spec = make_spec((4, 2), (None,), 16, torch.float32, "cpu")
    cache = KVCache(torch.full((160, PAGE, 2, 16), torch.nan), torch.full((160, PAGE, 2, 16), torch.nan))
    backend = TorchAttention(spec, [cache])
    for name in ("decodes", "mixed", "one_token", "long_decodes", "decodes"):
        case = make_case(BATCHES[name], (4, 2), 16, torch.float32)
        case.write_new_tokens()
        cache.k_NPGD[: len(case.k_NPGD)], cache.v_NPGD[: len(case.v_NPGD)] = case.k_NPGD, case.v_NPGD
        backend.plan(AttentionBatch(case.query_lens, case.context_lens, case.block_tables))
        out = backend.attend(0, case.q_THD)
        torch.testing.assert_close(
            out.double(), naive_attention(case, spec.layers[0].scale, None), atol=1e-5, rtol=1e-5
        )


def test_like_sequences_share_a_group_and_a_long_one_does_not_pad_the_others() -> None:
    def groups(lens: list[tuple[int, int]], most_keys: int = 100_000) -> list[list[int]]:
        return _split(AttentionBatch([q for q, _ in lens], [c for _, c in lens], []), most_keys)

    assert groups([(1, 60 + i) for i in range(16)]) == [list(range(16))]
    assert groups([(1, 50), (1, 9000), (1, 60)]) == [[0, 2], [1]]
    assert groups([(1, 700), (400, 400), (1, 690)]) == [[0, 2], [1]]
    assert groups([(1, 100)] * 5, most_keys=200) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("windows", LAYER_WINDOWS)
@pytest.mark.parametrize("heads", ["gqa", "mha", "mqa"])
@pytest.mark.parametrize("name", BATCHES)
class TestOnGPU:
    pytestmark = pytest.mark.gpu

    def test_triton(self, name: str, heads: str, windows: str) -> None:
        from lorafleet.workers.attention.triton_backend import TritonAttention

        spec = make_spec(HEADS[heads], LAYER_WINDOWS[windows], 64, torch.bfloat16, "cuda")
        check_batch(TritonAttention, spec, BATCHES[name])

    @needs_flashinfer
    @pytest.mark.filterwarnings("ignore")  # FlashInfer and its compiler warn as they please
    def test_flashinfer(self, name: str, heads: str, windows: str) -> None:
        spec = make_spec(HEADS[heads], LAYER_WINDOWS[windows], 128, torch.bfloat16, "cuda")
        check_batch(FlashInferAttention, spec, BATCHES[name])

    def test_torch_on_cuda(self, name: str, heads: str, windows: str) -> None:
        spec = make_spec(HEADS[heads], LAYER_WINDOWS[windows], 64, torch.float32, "cuda")
        check_batch(TorchAttention, spec, BATCHES[name])


# FA3 would leave most of a GPU idle, so these contexts are divided, beside decodes and short prompts too.
LONG_CHUNKS = {
    "alone": [(300, 20_000)],
    "several": [(200, 15_001), (64, 9000), (7, 7)],
    "behind_decodes": [(1, 900), (1, 5), (260, 18_000), (16, 16)],
}


@needs_flashinfer
@pytest.mark.filterwarnings("ignore")  # FlashInfer and its compiler warn as they please
@pytest.mark.parametrize("heads", [(32, 8), (8, 1)], ids=str)
@pytest.mark.parametrize("name", LONG_CHUNKS)
class TestLongChunksOnGPU:
    pytestmark = pytest.mark.gpu

    def test_flashinfer(self, name: str, heads: tuple[int, int]) -> None:
        spec = make_spec(heads, (None, None), 128, torch.bfloat16, "cuda")
        check_batch(FlashInferAttention, spec, LONG_CHUNKS[name])


@pytest.mark.parametrize("name", BATCHES)
class TestFP8OnGPU:
    pytestmark = pytest.mark.gpu

    def test_triton(self, name: str) -> None:
        from lorafleet.workers.attention.triton_backend import TritonAttention

        check_batch(TritonAttention, make_spec((4, 2), (None, WINDOW), 64, torch.bfloat16, "cuda", FP8), BATCHES[name])

    @needs_flashinfer
    @pytest.mark.filterwarnings("ignore")  # FlashInfer and its compiler warn as they please
    @pytest.mark.parametrize("heads", [HEADS["gqa"], HEADS["mha"], (8, 2)], ids=str)  # XQA serves the last
    def test_flashinfer(self, name: str, heads: tuple[int, int]) -> None:
        spec = make_spec(heads, (None, None), 128, torch.bfloat16, "cuda", FP8)
        if xqa_refusal(spec, torch.cuda.get_device_capability()) is None:
            compile_xqa()
            check_batch(FlashInferAttention, spec, BATCHES[name], 448.0, XQA_TOLERANCE)
        else:
            check_batch(FlashInferAttention, spec, BATCHES[name])

    def test_torch_on_cuda(self, name: str) -> None:
        check_batch(TorchAttention, make_spec((4, 2), (None, WINDOW), 64, torch.bfloat16, "cuda", FP8), BATCHES[name])


@pytest.mark.parametrize("name", BATCHES)
class TestCappedScoresOnGPU:
    pytestmark = pytest.mark.gpu

    def test_triton(self, name: str) -> None:
        from lorafleet.workers.attention.triton_backend import TritonAttention

        spec = make_spec((8, 4), (None, WINDOW), 256, torch.bfloat16, "cuda", softcap=3.0)
        check_batch(TritonAttention, spec, BATCHES[name])

    @needs_flashinfer
    @pytest.mark.filterwarnings("ignore")  # FlashInfer and its compiler warn as they please
    def test_flashinfer(self, name: str) -> None:
        spec = make_spec((8, 4), (None, WINDOW), 256, torch.bfloat16, "cuda", softcap=3.0)
        check_batch(FlashInferAttention, spec, BATCHES[name])


@needs_flashinfer
@pytest.mark.filterwarnings("ignore")  # FlashInfer and its compiler warn as they please
class TestFlashInferPlans:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("softcap", [None, 3.0])
    @pytest.mark.parametrize("windows", LAYER_WINDOWS)
    def test_graph_answers_for_each_new_batch(self, windows: str, softcap: float | None) -> None:
        spec = make_spec(HEADS["gqa"], LAYER_WINDOWS[windows], 128, torch.bfloat16, "cuda", softcap=softcap)
        cases = [make_case([(1, c) for c in lens], HEADS["gqa"], 128, torch.bfloat16, "cuda") for lens in CONTEXTS]
        for case in cases:
            case.write_new_tokens()
        most = max(len(case.k_NPGD) for case in cases)
        cache = KVCache(*(torch.zeros(most, PAGE, 2, 128, dtype=torch.bfloat16, device="cuda") for _ in "kv"))
        caches = [cache] * len(spec.layers)
        backend = FlashInferAttention(spec, caches).for_graph(len(CONTEXTS[0]), 2048)
        q_THD = cases[0].q_THD.clone()
        for layer in range(len(caches)):
            backend.attend(layer, q_THD)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [backend.attend(layer, q_THD) for layer in range(len(caches))]
        for case in cases:
            cache.k_NPGD[: len(case.k_NPGD)], cache.v_NPGD[: len(case.v_NPGD)] = case.k_NPGD, case.v_NPGD
            q_THD.copy_(case.q_THD)
            spare = [array("i", [*table, 10**6]) for table in case.block_tables]  # a block that is not filled yet
            backend.plan(AttentionBatch(case.query_lens, case.context_lens, spare))
            graph.replay()
            for out, own in zip(outs, spec.layers, strict=True):
                want = naive_attention(case, own.scale, own.window, softcap)
                torch.testing.assert_close(out.double(), want, atol=2e-2, rtol=2e-2)


@needs_flashinfer
@pytest.mark.filterwarnings("ignore")  # FlashInfer and its compiler warn as they please
class TestPlansDoNotWaitForTheDevice:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("name", ["decodes", "mixed"])
    def test_flashinfer(self, name: str) -> None:
        self.check(*self.make(FlashInferAttention, name))

    def test_flashinfer_for_a_graph(self) -> None:
        backend, batch = self.make(FlashInferAttention, "decodes")
        captured = backend.for_graph(len(batch.query_lens), 2048)
        assert captured is not None
        self.check(captured, batch)

    @pytest.mark.parametrize("name", ["decodes", "mixed"])
    def test_triton(self, name: str) -> None:
        from lorafleet.workers.attention.triton_backend import TritonAttention

        self.check(*self.make(TritonAttention, name))

    @staticmethod
    def make(kind: type[AttentionBackend], name: str) -> tuple[AttentionBackend, AttentionBatch]:
        spec = make_spec(HEADS["gqa"], (None,), 128, torch.bfloat16, "cuda")
        case = make_case(BATCHES[name], HEADS["gqa"], 128, spec.dtype, "cuda")
        batch = AttentionBatch(case.query_lens, case.context_lens, case.block_tables)
        return kind(spec, [KVCache(case.k_NPGD, case.v_NPGD)]), batch

    @staticmethod
    def check(backend: AttentionBackend, batch: AttentionBatch) -> None:
        backend.plan(batch)
        torch.cuda.synchronize()
        done = torch.cuda.Event()
        torch.cuda._sleep(400_000_000)  # a fifth of a second
        done.record()
        backend.plan(batch)
        assert not done.query()
