"""Finds the modules of FlashInfer that a model needs and that are not compiled yet. It compiles nothing.

FlashInfer chooses its modules where its wrappers plan and run. So every wrapper is used once with FlashInfer's own
switch against compiling, FLASHINFER_DISABLE_JIT. Then it raises an error that names the module, instead of compiling.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lorafleet.workers.attention.attention_backend import AttentionSpec, KVCache
from lorafleet.workers.attention.flashinfer_backend import FlashInferAttention, flashinfer_refusal
from lorafleet.workers.attention.module_build import ModuleSource

log = logging.getLogger(__name__)

NO_COMPILING = "FLASHINFER_DISABLE_JIT"


def missing_modules(spec: AttentionSpec) -> list[ModuleSource]:
    """Returns the modules that must be compiled before FlashInfer serves the layers that it can serve.

    Returns none if FlashInfer does not serve here, must not compile, or does not say what is missing. Its constructor
    then behaves as if nobody had asked.
    """
    if spec.device.type != "cuda" or importlib.util.find_spec("flashinfer") is None or NO_COMPILING in os.environ:
        return []
    served = [i for i, layer in enumerate(spec.layers) if flashinfer_refusal(spec.dtype, layer) is None]
    if not served:
        return []
    own = spec.of_layers(served)
    try:
        return _missing(own, [_one_block(own, i) for i in range(len(served))])
    except Exception as error:
        log.warning("could not find out whether FlashInfer's kernels are compiled: %s: %s", type(error).__name__, error)
        return []


def _missing(spec: AttentionSpec, caches: list[KVCache]) -> list[ModuleSource]:
    from flashinfer.jit.core import MissingJITCacheError

    missing: dict[str, ModuleSource] = {}
    with _without_compiling():
        for use in FlashInferAttention(spec, caches, compiles=False).first_uses():
            try:
                use()
            except MissingJITCacheError as error:
                module: Any = error.spec
                if not module.is_compiled:
                    module.write_ninja()
                    missing[module.name] = ModuleSource(
                        module.name, str(module.build_dir), str(module.ninja_path), str(module.lock_path)
                    )
    return list(missing.values())


@contextmanager
def _without_compiling() -> Iterator[None]:
    os.environ[NO_COMPILING] = "1"
    try:
        yield
    finally:
        del os.environ[NO_COMPILING]


def _one_block(spec: AttentionSpec, layer: int) -> KVCache:
    num_kv_heads, key_dim, value_dim = spec.layers[layer].kv_shape
    shape = 1, spec.block_size, num_kv_heads
    k_NPGD = torch.zeros(*shape, key_dim, dtype=spec.kv_dtype, device=spec.device)
    return KVCache(k_NPGD, torch.zeros(*shape, value_dim, dtype=spec.kv_dtype, device=spec.device))
