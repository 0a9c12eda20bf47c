"""The XQA kernels that tests need, compiled beside each other, since each one takes most of a minute."""

from __future__ import annotations

import functools

import torch

from lorafleet.kernels.quant.fp8 import FP8

# Head size, query heads of a KV head, whether there is a sliding window
XQA_VARIANTS = [
    (128, 4, False),
    (128, 4, True),
    (128, 7, False),
    (128, 8, False),
    (128, 1, False),
    (64, 4, False),
    (64, 8, False),
]


@functools.cache
def compile_xqa() -> None:
    from flashinfer.jit.core import build_jit_specs
    from flashinfer.jit.xqa import gen_xqa_module

    half = torch.bfloat16
    build_jit_specs(
        [
            gen_xqa_module(half, FP8, 16, head_dim, group, has_window, half)
            for head_dim, group, has_window in XQA_VARIANTS
        ]
    )
