"""Chooses the attention backend for a device, dtype and head size."""

from __future__ import annotations

import importlib.util
import logging
from typing import Literal

from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.attention.attention_backend import AttentionBackend, AttentionSpec, KVCache
from lorafleet.workers.attention.flashinfer_backend import DTYPES, HEAD_DIMS, FlashInferAttention
from lorafleet.workers.attention.torch_backend import TorchAttention

log = logging.getLogger(__name__)

BackendName = Literal["torch", "triton", "flashinfer"]
BEST_FIRST: tuple[BackendName, ...] = ("flashinfer", "triton", "torch")


def make_attention(
    spec: AttentionSpec, caches: list[KVCache], name: Literal["auto", "torch", "triton", "flashinfer"] = "auto"
) -> AttentionBackend:
    """Returns the backend of that name, or the best one that starts.

    "auto" chooses torch on a CPU. On CUDA it chooses FlashInfer if that is installed and serves the model, else
    Triton. A backend requested by name is never replaced: ConfigError says why it cannot serve and which can.
    """
    able = [backend for backend in BEST_FIRST if refusal(backend, spec) is None]
    if name != "auto":
        if (reason := refusal(name, spec)) is not None:
            raise ConfigError(f"attention backend {name!r} cannot serve this model: {reason}. Use {_either(able)}.")
        able = [name]
    for backend in able:
        try:
            made = _make(backend, spec, caches)
        except Exception as error:
            # FlashInfer compiles its kernels here, and the compiler or headers may be missing.
            others = [b for b in BEST_FIRST if b != backend and refusal(b, spec) is None]
            if name != "auto" or backend == able[-1]:
                message = f"attention backend {backend!r} did not start: {error}. Use {_either(others)}."
                raise ConfigError(message) from error
            log.warning("attention backend %s did not start, trying the next: %s", backend, error)
            continue
        log.info("attention backend: %s (requested: %s)", backend, name)
        return made
    raise AssertionError("torch serves everything")


def refusal(name: BackendName, spec: AttentionSpec) -> str | None:
    """Returns why a backend cannot serve, or None if it can."""
    if name == "torch":
        return None
    if spec.device.type != "cuda":
        return f"it needs a CUDA GPU, but the device is {spec.device.type!r}"
    if importlib.util.find_spec(name) is None:
        package = {"triton": "triton", "flashinfer": "flashinfer-python"}[name]
        return f"it is not installed (pip install {package})"
    if name == "flashinfer":
        if spec.dtype not in DTYPES:
            return f"it has no {str(spec.dtype).removeprefix('torch.')} kernels, only float16 and bfloat16"
        if spec.head_dim not in HEAD_DIMS:
            return f"it has no kernels for head_dim {spec.head_dim}, only {', '.join(map(str, HEAD_DIMS))}"
    return None


def _make(name: BackendName, spec: AttentionSpec, caches: list[KVCache]) -> AttentionBackend:
    if name == "flashinfer":
        return FlashInferAttention(spec, caches)
    if name == "triton":
        from lorafleet.workers.attention.triton_backend import TritonAttention  # triton is optional on a CPU

        return TritonAttention(spec, caches)
    return TorchAttention(spec, caches)


def _either(names: list[BackendName]) -> str:
    return " or ".join(repr(name) for name in ["auto", *names])
