"""Graphs that are captured, and an attention that is switched, while steps are in flight on a GPU."""

from __future__ import annotations

import time

import pytest
import torch

from lorafleet.offline.llm import LLM, LoRARequest, SamplingParams
from lorafleet.workers import step_startup
from lorafleet.workers.attention.flashinfer_modules import missing_modules
from lorafleet.workers.attention.module_build import Built, ModuleSource
from lorafleet.workers.step import decode_graphs
from tests.workers.attention.test_backends import make_spec
from tiny_models import Reference, make_adapter, make_model

pytestmark = pytest.mark.gpu

SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "vocab_size": 32000,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}
NEAR = 0.15  # of logprobs: bf16 GEMMs of other sizes, as padding makes them, round otherwise


class CountedBuild:
    """Is built at the 30th look. Each step looks once."""

    elapsed_s = 0.0

    def __init__(self) -> None:
        self.num_polls = 0

    def poll(self) -> Built | None:
        self.num_polls += 1
        return Built("") if self.num_polls >= 30 else None

    def close(self) -> None:
        pass


@pytest.mark.parametrize("switches", [False, True])
def test_answers_are_right_while_graphs_are_captured_and_the_attention_is_switched(
    tmp_path, prompt, monkeypatch, switches: bool
) -> None:
    """Each token of an answer was computed behind the one before it. A capture that overwrote the tokens in flight
    would show as a wrong logprob of the next token."""
    pytest.importorskip("flashinfer")
    base = make_model(tmp_path / "base", "llama3", dtype="bfloat16", **SHAPE)
    paths = {name: make_adapter(tmp_path / name, base, seed=i, std=0.02, r=8 << i) for i, name in enumerate("ab")}
    monkeypatch.setattr(decode_graphs, "CAPTURE_PERIOD_S", 0.0)  # a capture between any two steps
    monkeypatch.setattr(step_startup, "FIRST_SIZES", ())
    build = CountedBuild()
    sources = [ModuleSource("m", "folder", "file", "lock")] if switches else []
    monkeypatch.setattr(step_startup, "_late_modules", lambda *_: sources)
    if switches:
        monkeypatch.setattr(step_startup, "ModuleBuild", lambda _modules: build)
    llm = LLM(str(base), enable_lora=True, max_loras=2, max_num_seqs=24, kv_cache_tokens=32768)
    late, graphs = llm._engine.runner.steps.late, llm._engine.runner.steps.decode_graphs
    assert graphs is not None
    num_first = len(graphs)
    assert num_first > 0
    assert late.awaits_attention == switches
    jobs = [(prompt(3 + 5 * i), (None, "a", "b")[i % 3]) for i in range(20)]
    requests = {name: LoRARequest(name, i + 1, str(path)) for i, (name, path) in enumerate(paths.items())}
    params = [SamplingParams(temperature=0, max_tokens=40 + 4 * i, ignore_eos=True, logprobs=0) for i in range(20)]
    outputs = llm.generate([{"prompt_token_ids": p} for p, _ in jobs], params, [requests.get(name) for _, name in jobs])
    assert len(graphs) > num_first + 4
    assert (late.switched_s > 0) == switches
    half = Reference(base, dtype=torch.bfloat16, device="cuda")
    for (p, name), output in zip(jobs, outputs, strict=True):
        tokens = p + output.outputs[0].token_ids
        expected = half.logprobs(tokens, paths.get(name))[len(p) - 1 :]
        found = [entry.logprob for entry in output.outputs[0].logprobs]
        for ours, theirs in zip(found, expected, strict=True):
            assert abs(ours - theirs) < NEAR
    llm.close()


def test_idle_time_captures_all_graphs_within_the_memory_of_the_largest(tmp_path) -> None:
    pytest.importorskip("flashinfer")
    base = make_model(tmp_path / "base", "llama3", dtype="bfloat16", **SHAPE)
    llm = LLM(str(base), enable_lora=True, max_loras=8, max_num_seqs=128, kv_cache_tokens=32768)
    engine = llm._engine
    graphs = engine.runner.steps.decode_graphs
    assert graphs is not None
    assert graphs.has_more
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    started = time.monotonic()
    while engine.fills_idle_time:
        engine.step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    taken = free - torch.cuda.mem_get_info()[0]
    print(f"{graphs.most} graphs, {taken / 2**20:.0f} MiB, {time.monotonic() - started:.1f} s since the start")
    assert len(graphs) == graphs.most
    assert taken < 512 << 20  # mostly FlashInfer's buffers, 8 MiB for each size
    llm.close()


def test_a_capture_may_be_interrupted_at_any_layer_and_leaves_no_trace(tmp_path, prompt) -> None:
    """A capture that ended in the middle of a fork to another stream would break all later ones, and a pool that is
    not closed would keep every tensor's memory."""
    pytest.importorskip("flashinfer")
    base = make_model(tmp_path / "base", "llama3", dtype="bfloat16", **SHAPE)
    path = make_adapter(tmp_path / "a", base, seed=1, std=0.02, r=8)
    llm = LLM(str(base), enable_lora=True, max_loras=8, max_num_seqs=64, kv_cache_tokens=32768)
    engine = llm._engine
    graphs = engine.runner.steps.decode_graphs
    assert graphs is not None
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    request = LoRARequest("a", 1, str(path))

    def answer() -> list[int]:
        [output] = llm.generate([{"prompt_token_ids": prompt(9)}], params, [request])
        return output.outputs[0].token_ids

    expected, num_layers = answer(), SHAPE["num_hidden_layers"]
    interrupted = 0
    while engine.fills_idle_time:
        for layer in range(2 * num_layers):  # those of the step that compiles, and those of the capture
            checks = iter([False] * layer + [True])
            before = len(graphs)
            engine.step(lambda checks=checks: next(checks, True))
            interrupted += len(graphs) == before
            assert torch.cuda.current_stream().cuda_stream == 0
        engine.step()
    assert interrupted > 2 * num_layers
    assert len(graphs) == graphs.most
    assert answer() == expected
    taken = torch.cuda.memory_allocated()
    for _ in range(3):
        torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() == taken
    llm.close()


def test_late_captures_give_no_memory_back_for_which_the_next_steps_would_wait(tmp_path) -> None:
    pytest.importorskip("flashinfer")
    base = make_model(tmp_path / "base", "llama3", dtype="bfloat16", **SHAPE)
    llm = LLM(str(base), max_num_seqs=128, kv_cache_tokens=32768)
    engine = llm._engine
    assert engine.fills_idle_time
    num_frees = torch.cuda.memory_stats()["num_device_free"]
    while engine.fills_idle_time:
        engine.step()
    stats = torch.cuda.memory_stats()
    assert stats["num_device_free"] == num_frees
    with torch.inference_mode():
        engine.runner.steps.model.logits(torch.zeros(128, 1024, dtype=torch.bfloat16, device="cuda"))
    assert torch.cuda.memory_stats()["num_device_alloc"] == stats["num_device_alloc"]
    llm.close()


def test_compiled_modules_are_found_without_compiling() -> None:
    pytest.importorskip("flashinfer")
    from lorafleet.workers.attention.flashinfer_backend import FlashInferAttention
    from lorafleet.workers.kv_cache_sizing import _allocate

    spec = make_spec((8, 2), (None,), 128, torch.bfloat16, "cuda")
    FlashInferAttention(spec, _allocate(spec, 1, [(1.0, 1.0)]))
    started = time.monotonic()
    assert missing_modules(spec) == []
    assert missing_modules(make_spec((8, 2), (5,), 64, torch.float16, "cuda", softcap=7.0)) != []
    print(f"looked for modules in {time.monotonic() - started:.2f} s")
