"""The XQA kernels that tests need, compiled beside each other, since each one takes most of a minute."""

from __future__ import annotations

import functools

import torch

from lorafleet.kernels.quant.fp8 import FP8

# dtype of the cache, head size, query heads of a KV head, whether there is a sliding window
XQA_VARIANTS = [
    (FP8, 128, 4, False),
    (FP8, 128, 4, True),
    (FP8, 128, 7, False),
    (FP8, 128, 8, False),
    (FP8, 128, 1, False),
    (FP8, 64, 4, False),
    (FP8, 64, 8, False),
    (torch.bfloat16, 128, 4, False),
    (torch.bfloat16, 128, 1, False),
    (torch.bfloat16, 64, 8, False),
]
OTHER_TESTS = [(FP8, 128, 2, False), (torch.bfloat16, 128, 2, False)]  # test_backends.py and test_fp8_kv_cache.py


@functools.cache
def compile_xqa() -> None:
    from flashinfer.jit.core import build_jit_specs
    from flashinfer.jit.xqa import gen_xqa_module

    half = torch.bfloat16
    build_jit_specs(
        [
            gen_xqa_module(half, kv_dtype, 16, head_dim, group, has_window, half)
            for kv_dtype, head_dim, group, has_window in XQA_VARIANTS + OTHER_TESTS
        ]
    )
