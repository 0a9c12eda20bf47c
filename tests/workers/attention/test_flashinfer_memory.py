"""The memory that is kept for FlashInfer's attention until its kernels are compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lorafleet.kernels.quant.fp8 import FP8
from lorafleet.workers.attention.attention_backend import AttentionSpec, LayerAttention
from lorafleet.workers.attention.flashinfer_memory import SPARE_BYTES, WRAPPER_BYTES, flashinfer_bytes
from lorafleet.workers.step.decode_graphs import graph_sizes

MIB = 1 << 20
HOPPER, AMPERE = (9, 0), (8, 0)
LAYER = LayerAttention(num_heads=64, num_kv_heads=8, head_dim=128, scale=128**-0.5)
SPEC = AttentionSpec((LAYER, LAYER), 16, torch.bfloat16, torch.bfloat16, torch.device("cuda"))
SIZES = graph_sizes(512)
CONTEXT = 16_000  # 1000 blocks
BESIDE = 128 * MIB + SPARE_BYTES  # FlashInfer's workspace, and what is spare
DIVIDED = 4096 * 64 * (2 * 128 * 2 + 4)  # Queries and results in bfloat16, and a float32 sum of each.


def tables(num_seqs: int) -> int:
    return 4 * (3 * num_seqs + 1 + num_seqs * 1000)


@pytest.mark.parametrize(
    ("spec", "capability", "expected"),
    [
        # Wrappers for prompts, two for divided ones, decodes, and 16 captured sizes below 192 sequences.
        (SPEC, HOPPER, BESIDE + 20 * WRAPPER_BYTES + DIVIDED + tables(160)),
        # With capped scores, FlashInfer has all 27 captured sizes.
        (
            replace(SPEC, layers=(replace(LAYER, softcap=3.0),)),
            HOPPER,
            BESIDE + 31 * WRAPPER_BYTES + DIVIDED + tables(512),
        ),
        # Without FA3, nothing is divided.
        (SPEC, AMPERE, BESIDE + 29 * WRAPPER_BYTES + tables(512)),
        # Layers with a window are a kind of their own, and are not divided.
        (
            replace(SPEC, layers=(LAYER, replace(LAYER, window=64))),
            HOPPER,
            BESIDE + (29 * 2 + 2) * WRAPPER_BYTES + DIVIDED + tables(512),
        ),
        # FlashInfer does not serve layers with another size of values.
        (
            replace(SPEC, layers=(LAYER, replace(LAYER, value_dim=64))),
            AMPERE,
            BESIDE + 29 * WRAPPER_BYTES + tables(512),
        ),
        # XQA serves decodes, captured or not, with semaphores instead of wrappers.
        (
            replace(SPEC, kv_dtype=FP8, layers=(replace(LAYER, num_kv_heads=16),)),
            HOPPER,
            BESIDE + 8 * MIB + WRAPPER_BYTES + tables(512),
        ),
    ],
    ids=["plain", "capped", "without FA3", "window", "partly", "fp8"],
)
def test_all_that_flashinfer_allocates_is_counted(
    spec: AttentionSpec, capability: tuple[int, int], expected: int
) -> None:
    assert len(SIZES) == 27
    assert flashinfer_bytes(spec, capability, SIZES, CONTEXT) == expected


def test_the_need_depends_on_heads_and_sequences() -> None:
    capped = replace(SPEC, layers=(replace(LAYER, softcap=3.0),))
    assert flashinfer_bytes(capped, HOPPER, SIZES, CONTEXT) > 512 * MIB
    few = replace(SPEC, layers=(replace(LAYER, num_heads=8, num_kv_heads=2),))
    assert flashinfer_bytes(few, HOPPER, graph_sizes(16), CONTEXT) < 320 * MIB
    assert flashinfer_bytes(few, HOPPER, [], CONTEXT) == BESIDE + 4 * WRAPPER_BYTES + DIVIDED // 8 + 4
