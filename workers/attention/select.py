"""Chooses the attention backend for a device, dtype and the kinds of a model's layers."""

from __future__ import annotations

import importlib.util
import logging
from collections import Counter
from typing import Literal

from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.attention.attention_backend import AttentionBackend, AttentionSpec, KVCache, LayerAttention
from lorafleet.workers.attention.flashinfer_backend import FlashInferAttention, flashinfer_refusal
from lorafleet.workers.attention.mixed_attention import LayerPlace, MixedAttention
from lorafleet.workers.attention.own_decodes import with_own_decodes
from lorafleet.workers.attention.torch_backend import TorchAttention

log = logging.getLogger(__name__)

BackendName = Literal["torch", "triton", "flashinfer"]
BEST_FIRST: tuple[BackendName, ...] = ("flashinfer", "triton", "torch")


def make_attention(
    spec: AttentionSpec,
    caches: list[KVCache],
    name: Literal["auto", "torch", "triton", "flashinfer"] = "auto",
    *,
    has_fixed_order: bool = False,
) -> AttentionBackend:
    """Returns the backend of that name, or the best that start.

    "auto" chooses torch on a CPU. On CUDA it chooses FlashInfer for the layers that it serves if it is installed, and
    Triton for the others, and for captured decodes of many sequences where that is faster (own_decodes.py). A backend
    requested by name is never replaced: ConfigError says why it cannot serve and which can. With has_fixed_order, a
    query's bits on CUDA do not depend on the batch, and the name has no effect.
    """
    if has_fixed_order and spec.device.type == "cuda":
        if (reason := refusal("triton", spec)) is not None:
            raise ConfigError(f"batch_invariant needs Triton's attention: {reason}.")
        from lorafleet.workers.attention.paged_backend import PagedAttention  # triton is optional on a CPU

        return PagedAttention(spec, caches)
    if name != "auto" and (reason := refusal(name, spec)) is not None:
        able = [backend for backend in BEST_FIRST if refusal(backend, spec) is None]
        raise ConfigError(f"attention backend {name!r} cannot serve this model: {reason}. Use {_either(able)}.")
    usable = list(BEST_FIRST) if name == "auto" else [name]
    while True:
        by_layer = _choose(usable, spec)
        chosen = [backend for backend in usable if backend in by_layer]
        made: list[AttentionBackend] = []
        for backend in chosen:
            layers = [i for i, serving in enumerate(by_layer) if serving == backend]
            try:
                own = spec.of_layers(layers), [caches[i] for i in layers]
                one = _make(backend, *own)
                made.append(with_own_decodes(one, *own) if (name, backend) == ("auto", "flashinfer") else one)
            except Exception as error:
                # FlashInfer compiles its kernels here, and the compiler or headers may be missing.
                others = [b for b in BEST_FIRST if b != backend and refusal(b, spec) is None]
                if name != "auto" or backend == usable[-1]:
                    message = f"attention backend {backend!r} did not start: {error}. Use {_either(others)}."
                    raise ConfigError(message) from error
                log.warning("attention backend %s did not start, trying the next: %s", backend, error)
                usable.remove(backend)
                break
        else:
            break
    if len(made) == 1:
        log.info("attention backend: %s (requested: %s)", chosen[0], name)
        return made[0]
    counts = Counter(by_layer)
    shares = ", ".join(f"{backend} for {counts[backend]} layers" for backend in chosen)
    log.info("attention backends: %s (requested: %s)", shares, name)
    places = [LayerPlace(chosen.index(b), by_layer[:i].count(b)) for i, b in enumerate(by_layer)]
    return MixedAttention(made, places)


def may_use_flashinfer(spec: AttentionSpec, name: str, *, has_fixed_order: bool) -> bool:
    """Returns whether make_attention() with these arguments tries FlashInfer for any layer."""
    if has_fixed_order or name not in ("auto", "flashinfer"):
        return False
    return any(_layer_refusal("flashinfer", spec, kind) is None for kind in spec.kinds)


def refusal(name: BackendName, spec: AttentionSpec) -> str | None:
    """Returns why a backend cannot serve all layers, or None if it can."""
    return next((reason for kind in spec.kinds if (reason := _layer_refusal(name, spec, kind)) is not None), None)


def _layer_refusal(name: BackendName, spec: AttentionSpec, layer: LayerAttention) -> str | None:
    if name == "torch":
        return None
    if spec.device.type != "cuda":
        return f"it needs a CUDA GPU, but the device is {spec.device.type!r}"
    if importlib.util.find_spec(name) is None:
        package = {"triton": "triton", "flashinfer": "flashinfer-python"}[name]
        return f"it is not installed (pip install {package})"
    return flashinfer_refusal(spec.dtype, layer) if name == "flashinfer" else None


def _choose(usable: list[BackendName], spec: AttentionSpec) -> list[BackendName]:
    """Returns the first of the usable backends that serves it, for each layer."""
    of_kind = [next(name for name in usable if _layer_refusal(name, spec, kind) is None) for kind in spec.kinds]
    return [of_kind[kind] for kind in spec.kind_of_layer]


def _make(name: BackendName, spec: AttentionSpec, caches: list[KVCache]) -> AttentionBackend:
    if name == "flashinfer":
        return FlashInferAttention(spec, caches)
    if name == "triton":
        from lorafleet.workers.attention.triton_backend import TritonAttention  # triton is optional on a CPU

        return TritonAttention(spec, caches)
    return TorchAttention(spec, caches)


def _either(names: list[BackendName]) -> str:
    return " or ".join(repr(name) for name in ["auto", *names])
