"""Models whose layers differ: in heads and head sizes, windows and chunks, sinks, and whose cache they read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.quant.fp8 import FP8
from lorafleet.workers.attention.attention_backend import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    KVCache,
    LayerAttention,
)
from lorafleet.workers.attention.torch_backend import TorchAttention
from tests.kernels.attention_cases import BATCHES, PAGE, PagedCase, in_fp8, make_case, naive_attention
from tests.kernels.harness import poison_free_memory, run_interpreted

PLAIN = LayerAttention(num_heads=4, num_kv_heads=2, head_dim=24, scale=0.3)
CHUNK = 24  # ends inside a block
LAYERS = (
    PLAIN,
    replace(PLAIN, window=11, has_sinks=True),
    replace(PLAIN, chunk=CHUNK),
    LayerAttention(num_heads=4, num_kv_heads=1, head_dim=48, scale=0.2),
    replace(PLAIN, value_dim=16, has_sinks=True),
    replace(PLAIN, window=7, cache_layer=0),
    LayerAttention(
        num_heads=6, num_kv_heads=2, head_dim=16, scale=2.0, window=40, chunk=50, softcap=3.0, has_sinks=True
    ),
    replace(PLAIN, has_sinks=True, value_dim=16, cache_layer=4),
    LayerAttention(num_heads=6, num_kv_heads=1, head_dim=40, scale=0.2, value_dim=24, values_in_keys=True),
)
SHORT = {"decodes": [(1, 5), (1, 130), (1, 48)], "mixed": [(1, 49), (17, 17), (3, 70), (30, 30)]}
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
KV_SCALES = (0.03, 0.01)


def sinks_of(layers: tuple[LayerAttention, ...], device: str) -> dict[int, Tensor]:
    """Sinks as large as the largest scores, and negative ones."""
    return {
        i: torch.linspace(-2, 3, layer.num_heads, device=device) for i, layer in enumerate(layers) if layer.has_sinks
    }


def check_layers(
    make: type[AttentionBackend],
    lens: list[tuple[int, int]],
    dtype: torch.dtype,
    fp8: bool = False,
    device: str = "cpu",
    layers: tuple[LayerAttention, ...] = LAYERS,
) -> None:
    """Compares every layer with the naive attention of its kind. All layers have the same block tables."""
    kv_dtype, sinks = FP8 if fp8 else dtype, sinks_of(layers, device)
    spec = AttentionSpec(layers, PAGE, dtype, kv_dtype, torch.device(device), sinks)
    cases: list[PagedCase] = []
    caches: list[KVCache] = []
    for i, layer in enumerate(layers):
        if layer.cache_layer is not None:
            cases.append(cases[layer.cache_layer])
            caches.append(caches[layer.cache_layer])
            continue
        torch.manual_seed(i)
        heads = layer.num_heads, layer.num_kv_heads
        case = make_case(lens, heads, layer.head_dim, dtype, device, layer.value_dim)
        if layer.values_in_keys:
            past = [(k, k[..., : layer.out_dim]) for k, _ in case.past]
            case = replace(
                case, v_NPGD=case.k_NPGD[..., : layer.out_dim], v_TGD=case.k_TGD[..., : layer.out_dim], past=past
            )
        case.write_new_tokens()
        k_scale, v_scale = KV_SCALES if fp8 else (1.0, 1.0)
        scales = k_scale, k_scale if layer.values_in_keys else v_scale
        cases.append(in_fp8(case, *scales) if fp8 else case)
        k_NPGD = cases[-1].k_NPGD.clone()
        v_NPGD = k_NPGD[..., : layer.out_dim] if layer.values_in_keys else cases[-1].v_NPGD.clone()
        caches.append(KVCache(k_NPGD, v_NPGD, *scales))
        assert cases[-1].block_tables == cases[0].block_tables
    backend = make(spec, caches)
    backend.plan(AttentionBatch(cases[0].query_lens, cases[0].context_lens, cases[0].block_tables))
    for i, layer in enumerate(layers):
        if device == "cuda":
            poison_free_memory()
        case = cases[i]
        want = naive_attention(case, layer.scale, layer.window, layer.softcap, layer.chunk, sinks.get(i))
        given = torch.full(want.shape, torch.nan, dtype=dtype, device=device)
        for out in (backend.attend(i, case.q_THD), backend.attend(i, case.q_THD, given)):
            assert out.dtype == dtype
            error = ((out.double() - want).abs() / (1 + want.abs())).max()
            assert error < TOLERANCE[dtype], f"{error=} of layer {i}, {layer}"
        assert out is given


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ["one_token", "decodes", "equal_prefills", "mixed"])
def test_torch_serves_all_kinds(name: str, dtype: torch.dtype, fp8: bool) -> None:
    check_layers(TorchAttention, BATCHES[name], dtype, fp8)


def test_torch_masks_one_whole_prompt_only_where_its_layer_must() -> None:
    """A prompt alone needs no mask unless a window or chunk ends in it."""
    check_layers(TorchAttention, [(60, 60)], torch.float32)
    check_layers(TorchAttention, [(CHUNK, CHUNK)], torch.float32)


def test_interpreted_kernels_serve_all_kinds() -> None:
    run_interpreted("""
        import torch
        from lorafleet.kernels.decoder import decode_attention, head_tiles, key_spans, paged_attention
        from lorafleet.workers.attention.triton_backend import TritonAttention
        from tests.workers.attention.test_layer_kinds import LAYERS, SHORT, check_layers

        key_spans.LEAST_KEYS = 32
        head_tiles.WIDEST_HEAD = 32
        paged_attention.WIDE_HEADS = decode_attention.MOST_HEADS = 4
        check_layers(TritonAttention, SHORT["decodes"], torch.float32)
        check_layers(TritonAttention, SHORT["mixed"], torch.float16)
        check_layers(TritonAttention, SHORT["mixed"][1:], torch.float32, fp8=True, layers=LAYERS[:3])
        check_layers(TritonAttention, SHORT["decodes"], torch.float16, fp8=True, layers=(*LAYERS[:2], LAYERS[-1]))
    """)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((replace(PLAIN, cache_layer=0),), "layer 0 cannot read the cache of layer 0"),
        ((PLAIN, replace(PLAIN, cache_layer=0), replace(PLAIN, cache_layer=1)), "layer 1 has no cache"),
        ((PLAIN, replace(PLAIN, num_kv_heads=1, cache_layer=0)), r"\(2, 24, 24\), \(1, 24, 24\)"),
    ],
)
def test_a_layer_reads_the_cache_of_an_earlier_layer_of_its_shape(
    layers: tuple[LayerAttention, ...], message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        AttentionSpec(layers, PAGE, torch.float32, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", BATCHES)
class TestOnGPU:
    pytestmark = pytest.mark.gpu

    def test_triton(self, name: str, dtype: torch.dtype, fp8: bool) -> None:
        from lorafleet.workers.attention.triton_backend import TritonAttention

        # Gemma 4's full layers, gpt-oss, and MLA in the naive form and in the latent one, by their head sizes.
        real = (
            LayerAttention(128, 1, 576, 0.07, value_dim=512, values_in_keys=True),
            LayerAttention(16, 4, 512, 0.05),
            LayerAttention(64, 8, 64, 0.125, window=128, has_sinks=True),
            LayerAttention(16, 16, 192, 0.07, value_dim=128),
        )
        check_layers(TritonAttention, BATCHES[name], dtype, fp8, "cuda")
        check_layers(TritonAttention, BATCHES[name], dtype, fp8, "cuda", real)

    def test_torch(self, name: str, dtype: torch.dtype, fp8: bool) -> None:
        check_layers(TorchAttention, BATCHES[name], dtype, fp8, "cuda")
