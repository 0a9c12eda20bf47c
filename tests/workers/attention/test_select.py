from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.attention import select
from lorafleet.workers.attention.attention_backend import AttentionSpec, KVCache
from lorafleet.workers.attention.select import make_attention, refusal
from lorafleet.workers.attention.torch_backend import TorchAttention

SPEC = AttentionSpec(
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    scale=0.125,
    sliding_windows=(None,),
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
    assert "head_dim 80" in str(refusal("flashinfer", replace(CUDA_SPEC, head_dim=80)))


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
