from __future__ import annotations

import logging
import threading
from concurrent.futures import Executor, Future
from typing import Any

import pytest
import torch

from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.messages import EngineRequest
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers import step_startup
from lorafleet.workers.attention import switching_attention
from lorafleet.workers.attention.attention_backend import AttentionBatch, AttentionSpec, KVCache, LayerAttention
from lorafleet.workers.attention.module_build import Built, ModuleSource
from lorafleet.workers.attention.switching_attention import SwitchingAttention
from lorafleet.workers.attention.torch_backend import TorchAttention
from lorafleet.workers.startup import build_engine

SPEC = AttentionSpec(
    layers=(LayerAttention(num_heads=2, num_kv_heads=1, head_dim=8, scale=1.0),),
    block_size=4,
    dtype=torch.float32,
    kv_dtype=torch.float32,
    device=torch.device("cpu"),
)


class Build:
    """Is built when a test says so."""

    elapsed_s = 83.0

    def __init__(self) -> None:
        self.built: Built | None = None
        self.num_closed = 0

    def poll(self) -> Built | None:
        return self.built

    def close(self) -> None:
        self.num_closed += 1


def made(value: float) -> TorchAttention:
    """Returns an attention whose results are the value."""
    cache = KVCache(torch.ones(1, 4, 1, 8), torch.full((1, 4, 1, 8), value))
    return TorchAttention(SPEC, [cache])


class Inline(Executor):
    """Runs what is submitted at once."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def result(attention: SwitchingAttention) -> float:
    attention.plan(AttentionBatch([1], [1], [[0]]))
    return attention.attend(0, torch.ones(1, 2, 8)).mean().item()


def test_the_other_backend_takes_over_when_its_kernels_are_compiled(caplog: pytest.LogCaptureFixture) -> None:
    build = Build()
    attention = SwitchingAttention(made(1.0), lambda: made(2.0), Inline())
    assert not attention.poll()  # nothing is compiled yet
    with caplog.at_level(logging.INFO, switching_attention.__name__):
        attention.start(build)
        assert not attention.poll()
        assert attention.is_waiting
        assert result(attention) == 1.0
        build.built = Built("")
        assert attention.poll()
        assert "switched 83 s after" in caplog.text
    assert not attention.is_waiting
    assert result(attention) == 2.0
    assert not attention.poll()  # once


@pytest.mark.parametrize("compiles", [False, True])
def test_the_first_backend_stays_if_the_other_cannot_be_made(caplog: pytest.LogCaptureFixture, compiles: bool) -> None:
    def fail() -> TorchAttention:
        raise RuntimeError("no memory")

    build = Build()
    attention = SwitchingAttention(made(1.0), fail, Inline())
    attention.start(build)
    build.built = Built("" if compiles else "nvcc not found")
    with caplog.at_level(logging.INFO, switching_attention.__name__):
        assert not attention.poll()
        assert not attention.poll()
    [warning] = caplog.messages
    assert ("no memory" if compiles else "nvcc not found") in warning
    assert result(attention) == 1.0
    assert not attention.is_waiting


def test_steps_go_on_with_the_first_backend_while_the_other_is_made_beside_them() -> None:
    goes_on = threading.Event()

    def make() -> TorchAttention:
        assert goes_on.wait(60)
        return made(2.0)

    build = Build()
    attention = SwitchingAttention(made(1.0), make)
    attention.start(build)
    build.built = Built("")
    assert not attention.poll()
    assert not attention.poll()
    assert attention.is_waiting
    assert result(attention) == 1.0
    goes_on.set()
    while not attention.poll():
        assert attention.is_waiting
    assert result(attention) == 2.0
    attention.close()


def test_close_ends_a_build_and_nothing_is_switched_later() -> None:
    build = Build()
    attention = SwitchingAttention(made(1.0), lambda: made(2.0), Inline())
    attention.start(build)
    attention.close()
    attention.close()
    assert build.num_closed == 1
    build.built = Built("")
    assert not attention.poll()


def test_an_engine_answers_alike_before_during_and_after_the_switch(fleet, prompt, monkeypatch) -> None:
    base = fleet("llama3").base
    config = EngineConfig(str(base), kv_cache_tokens=1024, async_scheduling=True)
    build, names = Build(), []

    def make(spec: AttentionSpec, caches: list[KVCache], name: str = "auto", **_: bool) -> TorchAttention:
        names.append(name)
        return TorchAttention(spec, caches)

    def answers() -> tuple[list[int], list[int]]:
        """Returns the tokens of an answer, and the number of tokens after which the attention was switched."""
        build.built = None
        engine, tokens, switched = build_engine(config), [], []
        engine.add(
            EngineRequest(
                request_id="one",
                prompt_token_ids=prompt(9),
                params=SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
            )
        )
        while engine.has_work:
            tokens += [token for output in engine.step() for token in output.token_ids]
            if engine.stats().attention_switched_s and not switched:
                switched.append(len(tokens))
            build.built = Built("") if len(tokens) >= 5 else None
        assert engine.stats().attention_waits == 0
        engine.close()
        return tokens, switched

    expected, never = answers()
    assert never == []
    monkeypatch.setattr(step_startup, "_late_modules", lambda *_: [ModuleSource("module", "folder", "file", "lock")])
    monkeypatch.setattr(step_startup, "ModuleBuild", lambda _modules: build)
    monkeypatch.setattr(step_startup, "make_attention", make)
    monkeypatch.setattr(switching_attention, "ThreadPoolExecutor", lambda *_: Inline())
    tokens, switched = answers()
    assert tokens == expected
    assert len(tokens) == 12
    assert switched == [6]
    assert names == ["triton", "auto"]


def test_an_attention_by_name_or_of_several_ranks_waits_for_its_compiler(monkeypatch) -> None:
    module = ModuleSource("module", "folder", "file", "lock")
    monkeypatch.setattr(step_startup, "missing_modules", lambda _spec: [module])
    monkeypatch.setattr(step_startup, "refusal", lambda _name, _spec: None)
    auto = EngineConfig("model")
    assert step_startup._late_modules(auto, SPEC, 1) == [module]
    assert step_startup._late_modules(auto, SPEC, 2) == []
    assert step_startup._late_modules(EngineConfig("model", attention_backend="flashinfer"), SPEC, 1) == []
    monkeypatch.setattr(step_startup, "refusal", lambda _name, _spec: "it is not installed")
    assert step_startup._late_modules(auto, SPEC, 1) == []
