from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.quantization_methods import Method
from lorafleet.workers.attention.torch_backend import TorchAttention
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.quantization import resolved
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.startup import build_engine
from lorafleet.workers.step import decode_capture
from lorafleet.workers.step.decode_capture import DecodeCapture, DecodeKey, split_gemms
from lorafleet.workers.step.interruption import WorkInterrupted
from lorafleet.workers.tp.group import TPGroup
from tiny_models import make_model


@pytest.mark.parametrize(
    ("family", "quantization", "tp_size", "expected"),
    [
        ("llama3", None, 1, "plain"),
        ("qwen2", None, 1, "plain"),
        ("llama3", None, 2, None),
        ("llama3", "fp8", 1, None),  # on a CPU, no kernel of ours multiplies it
        ("mixtral", None, 1, None),
    ],
)
def test_only_models_like_the_measured_one_split_the_gpu(
    tmp_path: Path, family: str, quantization: Method | None, tp_size: int, expected: str | None
) -> None:
    config = read_model_config(make_model(tmp_path / "base", family))
    config = replace(config, quantization=resolved(config.quantization, quantization))
    model = DecoderModel(config, TPGroup(0, tp_size), torch.bfloat16, torch.device("cpu"))
    assert split_gemms(model) == expected


class NoStream:
    def __init__(self, *_: object) -> None:
        pass


class NoGraph:
    """Replays nothing: on a CPU, a capture has already computed."""

    may_finish = threading.Event()

    def __init__(self, *, keep_graph: bool) -> None:
        assert keep_graph

    def instantiate(self) -> None:
        assert NoGraph.may_finish.wait(60)

    def capture_begin(self, *, pool: object, capture_error_mode: str) -> None:
        assert pool == (0, 0) and capture_error_mode == "thread_local"

    def capture_end(self) -> None:
        pass

    def replay(self) -> None:
        pass


class WithGraphs(TorchAttention):
    def for_graph(self, num_seqs: int, max_context: int) -> WithGraphs:  # type: ignore[override]  # a stand-in
        assert max_context == 64
        assert num_seqs in (2, 4)
        return self


@pytest.mark.parametrize("fails", [False, True])
def test_a_late_capture_leaves_the_inputs_the_tokens_and_the_stream_of_the_steps(
    fleet, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """The device's part is left out. A capture computes a step of padding, which overwrites what is in flight: drafts
    that wait for masks, and tokens."""
    order: list[str] = []
    NoGraph.may_finish.set()
    for name, stand_in in (
        ("Stream", NoStream),
        ("CUDAGraph", NoGraph),
        ("graph_pool_handle", lambda: (0, 0)),
        ("stream", lambda _: nullcontext()),
        ("synchronize", lambda _: order.append("waited")),
        ("current_stream", lambda _: "the steps'"),
        ("set_stream", (streams := []).append),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(decode_capture, "borrowed", lambda tensor: tensor)
    engine = build_engine(EngineConfig(str(fleet("llama3").base), kv_cache_tokens=64, max_num_seqs=4))
    steps = engine.runner.steps
    spec = steps._attention._spec  # type: ignore[attr-defined]  # TorchAttention's
    attention = WithGraphs(spec, steps.caches)
    capture = DecodeCapture(steps.model, steps.caches, None, attention, steps.inputs, 0, None, 64, torch.device("cpu"))
    steps.inputs.sampled_B.copy_(torch.tensor([3, 1, 4, 1]))
    steps.inputs.known_tokens(4).copy_(torch.tensor([7, 8, 9, 10]))
    compute = attention.attend

    def attend(layer: int, q_THD: torch.Tensor, _out: torch.Tensor | None = None) -> torch.Tensor:
        order.append("computed")
        return compute(layer, q_THD)

    monkeypatch.setattr(attention, "attend", attend)
    is_interrupted = iter([False, True])
    with pytest.raises(WorkInterrupted):
        capture.capture(DecodeKey(2, 0), lambda: next(is_interrupted))
    assert order[-2:] == ["computed", "waited"]
    assert steps.inputs.sampled_B.tolist() == [3, 1, 4, 1]
    if fails:
        monkeypatch.setattr(steps.model, "logits", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            capture.capture(DecodeKey(4, 0))
    else:
        graph = capture.capture(DecodeKey(2, 0))
        assert graph is not None
        assert graph.hidden_BD.shape[0] == graph.logits_BW.shape[0] == graph.key.num_rows == 2
        assert order[-2:] == ["computed", "waited"]  # or the padding's tokens might be written after those in flight
        NoGraph.may_finish.clear()
        num_layers = steps.model.config.num_layers
        with pytest.raises(WorkInterrupted):  # while it is made executable
            capture.capture(DecodeKey(4, 0), partial(next, iter([False] * 2 * num_layers), True))
        NoGraph.may_finish.set()
        order.append("interrupted")
        graph = capture.capture(DecodeKey(4, 0))
        assert graph is not None and graph.key.num_rows == 4
        assert order[-1] == "interrupted", "nothing is computed again"
    assert steps.inputs.sampled_B.tolist() == [3, 1, 4, 1]
    assert steps.inputs.known_tokens(4).tolist() == [7, 8, 9, 10]
    assert streams == ["the steps'"] * (2 if fails else 3)
    engine.close()
