from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.attention import select
from lorafleet.workers.attention.attention_backend import (
    AttentionBatch,
    AttentionSpec,
    DraftRows,
    KVCache,
    LayerAttention,
)
from lorafleet.workers.attention.mixed_attention import MixedAttention
from lorafleet.workers.attention.select import make_attention, refusal
from lorafleet.workers.attention.torch_backend import TorchAttention

LAYER = LayerAttention(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125)
SPEC = AttentionSpec(
    layers=(LAYER,),
    block_size=16,
    dtype=torch.float32,
    kv_dtype=torch.float32,
    device=torch.device("cpu"),
)
CUDA_SPEC = replace(SPEC, device=torch.device("cuda"), dtype=torch.bfloat16, kv_dtype=torch.bfloat16)


def caches() -> list[KVCache]:
    return [KVCache(torch.zeros(2, 16, 2, 64), torch.zeros(2, 16, 2, 64))]


def test_auto_is_torch_on_a_cpu_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lorafleet"):
        assert isinstance(make_attention(SPEC, caches(), "auto"), TorchAttention)
    assert [r.message for r in caplog.records] == ["attention backend: torch (requested: auto)"]


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_named_backend_that_cannot_serve_is_an_error_naming_one_that_can(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{name}' cannot serve.*needs a CUDA GPU.*Use 'auto' or 'torch'"):
        make_attention(SPEC, caches(), name)  # type: ignore[arg-type]  # parametrize loses the literal


def test_flashinfer_refuses_what_it_has_no_kernels_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select.importlib.util, "find_spec", lambda _: object())
    assert refusal("flashinfer", CUDA_SPEC) is None
    assert "float32" in str(refusal("flashinfer", replace(CUDA_SPEC, dtype=torch.float32)))
    for layer, reason in (
        (replace(LAYER, head_dim=80), "head_dim 80"),
        (replace(LAYER, value_dim=32), "values of another size, 32"),
        (replace(LAYER, chunk=8), "chunked"),
    ):
        assert reason in str(refusal("flashinfer", replace(CUDA_SPEC, layers=(LAYER, layer))))
        assert refusal("triton", replace(CUDA_SPEC, layers=(LAYER, layer))) is None
    sinks = replace(CUDA_SPEC, layers=(replace(LAYER, has_sinks=True),), sinks={0: torch.zeros(4)})
    assert "sinks" in str(refusal("flashinfer", sinks))


class Recorded:
    """A backend that records the calls it gets, with its name."""

    def __init__(self, name: str, calls: list[tuple[str, str, int]]) -> None:
        self._name, self._calls = name, calls

    def plan(self, batch: AttentionBatch) -> None:
        self._calls.append((self._name, "plan", len(batch.query_lens)))

    def for_graph(self, num_seqs: int, max_context: int, drafts: DraftRows | None = None) -> Recorded | None:
        assert drafts is None
        return Recorded(f"captured {num_seqs} x {max_context}", self._calls) if self._name == "flashinfer" else None

    def attend(self, layer: int, q_THD: Tensor, out_THD: Tensor | None = None) -> Tensor:
        self._calls.append((self._name, "attend", layer))
        return q_THD if out_THD is None else out_THD


def test_auto_serves_each_layer_by_the_best_backend_for_its_kind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[tuple[str, str, int]] = []
    parts: dict[str, tuple[AttentionSpec, list[KVCache]]] = {}

    def make(name: str, spec: AttentionSpec, caches: list[KVCache]) -> Recorded:
        parts[name] = spec, caches
        return Recorded(name, calls)

    monkeypatch.setattr(select.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(select, "_make", make)
    with_sinks = replace(LAYER, window=8, has_sinks=True)
    sinks = {1: torch.ones(4), 3: torch.zeros(4)}
    spec = replace(CUDA_SPEC, layers=(LAYER, with_sinks, LAYER, with_sinks), sinks=sinks)
    own = [caches()[0] for _ in spec.layers]
    with caplog.at_level(logging.INFO, "lorafleet"):
        mixed = make_attention(spec, own)
    assert caplog.messages == ["attention backends: flashinfer for 2 layers, triton for 2 layers (requested: auto)"]
    assert isinstance(mixed, MixedAttention)
    mixed.plan(AttentionBatch([1], [1], [[0]]))
    for layer in range(4):
        mixed.attend(layer, torch.zeros(1, 4, 64))
    f, t = "flashinfer", "triton"
    assert calls[:2] == [(f, "plan", 1), (t, "plan", 1)]
    assert calls[2:] == [(f, "attend", 0), (t, "attend", 0), (f, "attend", 1), (t, "attend", 1)]
    assert [parts[name][1] for name in ("flashinfer", "triton")] == [[own[0], own[2]], [own[1], own[3]]]
    assert parts["triton"][0].sinks == {0: sinks[1], 1: sinks[3]}
    assert mixed.for_graph(1, 64) is None  # since one of them has none
    with pytest.raises(ConfigError, match=r"'flashinfer' cannot serve.*sinks.*Use 'auto' or 'triton' or 'torch'"):
        make_attention(spec, own, "flashinfer")


def test_auto_falls_back_when_flashinfer_cannot_compile_but_a_named_one_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make(name: str, spec: AttentionSpec, caches: list[KVCache]) -> TorchAttention:
        if name == "flashinfer":
            raise RuntimeError("nvcc not found")
        return TorchAttention(replace(spec, device=torch.device("cpu")), caches)

    monkeypatch.setattr(select.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(select, "_make", make)
    assert isinstance(make_attention(CUDA_SPEC, caches(), "auto"), TorchAttention)
    with pytest.raises(ConfigError, match=r"nvcc not found.*Use 'auto' or 'triton' or 'torch'"):
        make_attention(CUDA_SPEC, caches(), "flashinfer")
