"""Which modules of FlashInfer are missing, by a stand-in for FlashInfer's compiler."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from lorafleet.workers.attention import flashinfer_modules
from lorafleet.workers.attention.attention_backend import AttentionSpec, KVCache, LayerAttention
from lorafleet.workers.attention.flashinfer_modules import NO_COMPILING, missing_modules
from lorafleet.workers.attention.module_build import ModuleSource

LAYER = LayerAttention(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125)
SPEC = AttentionSpec((LAYER,), 16, torch.bfloat16, torch.bfloat16, torch.device("cuda"))


@dataclass
class JitModule:
    """FlashInfer's description of a module."""

    name: str
    is_compiled: bool
    written: list[str] = field(default_factory=list)
    build_dir = Path("/cache")
    ninja_path = Path("/cache/build.ninja")
    lock_path = Path("/tmp/lock")

    def write_ninja(self) -> None:
        self.written.append(self.name)


class NotBuiltError(RuntimeError):
    def __init__(self, spec: JitModule) -> None:
        super().__init__("JIT compilation is disabled")
        self.spec = spec


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> list[JitModule | Exception | None]:
    """Returns the list of what the first use of each wrapper finds: None for a module that is installed."""
    found: list[JitModule | Exception | None] = []

    class Attention:
        def __init__(self, spec: AttentionSpec, caches: list[KVCache], *, compiles: bool) -> None:
            assert not compiles
            assert len(spec.layers) == len(caches)

        def first_uses(self) -> Iterator[Callable[[], None]]:
            for each in found:
                yield lambda each=each: self._use(each)

        def _use(self, each: JitModule | Exception | None) -> None:
            assert os.environ[NO_COMPILING] == "1"
            if isinstance(each, Exception):
                raise each
            if each is not None:
                raise NotBuiltError(each)

    core = ModuleType("flashinfer.jit.core")
    core.MissingJITCacheError = NotBuiltError  # type: ignore[attr-defined]  # a stand-in
    for name in ("flashinfer", "flashinfer.jit"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "flashinfer.jit.core", core)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(flashinfer_modules, "FlashInferAttention", Attention)
    monkeypatch.setattr(flashinfer_modules, "_one_block", lambda _spec, _layer: None)
    monkeypatch.delenv(NO_COMPILING, raising=False)
    return found


def test_modules_that_are_not_compiled_are_missing_once_each(modules: list[JitModule | Exception | None]) -> None:
    decode, prefill = JitModule("decode", False), JitModule("prefill", False)
    modules += [decode, None, prefill, decode, JitModule("compiled", True)]
    expected = [ModuleSource(name, "/cache", "/cache/build.ninja", "/tmp/lock") for name in ("decode", "prefill")]
    assert missing_modules(SPEC) == expected
    assert prefill.written == ["prefill"]
    assert NO_COMPILING not in os.environ


def test_nothing_is_missing_where_flashinfer_does_not_serve(
    modules: list[JitModule | Exception | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    modules.append(JitModule("decode", False))
    assert missing_modules(replace(SPEC, device=torch.device("cpu"))) == []
    assert missing_modules(replace(SPEC, layers=(replace(LAYER, chunk=8),))) == []
    assert len(missing_modules(replace(SPEC, layers=(replace(LAYER, chunk=8), LAYER)))) == 1
    monkeypatch.setenv(NO_COMPILING, "1")  # its user has forbidden it to compile
    assert missing_modules(SPEC) == []
    assert os.environ[NO_COMPILING] == "1"


def test_a_flashinfer_that_does_not_say_what_is_missing_is_used_as_it_is(
    modules: list[JitModule | Exception | None], caplog: pytest.LogCaptureFixture
) -> None:
    modules.append(AttributeError("no such thing"))
    assert missing_modules(SPEC) == []
    assert "no such thing" in caplog.text
    assert NO_COMPILING not in os.environ
