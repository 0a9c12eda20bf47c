from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.linear.linear_tuning import MOST_SPLIT_ROWS, LinearShape
from lorafleet.protocol.quantization_methods import Method
from lorafleet.workers.attention.attention_backend import AttentionBatch, KVCache
from lorafleet.workers.attention.select import make_attention
from lorafleet.workers.attention_spec import attention_spec
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.quantization import resolved
from lorafleet.workers.bases.weights import fill_randomly
from lorafleet.workers.models import layers as layers_module
from lorafleet.workers.models import mlp as mlp_module
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.models.mlp import MLP
from lorafleet.workers.step.own_linears import own_linears
from lorafleet.workers.tp.group import TPGroup
from tiny_models import make_model

CPU = torch.device("cpu")
GATED = LinearShape(gated=True, stages=4)


def gated_shape(*_: object) -> LinearShape:
    return GATED


def make(folder: Path, family: str, quantization: Method | None = None, tp_size: int = 1) -> DecoderModel:
    config = read_model_config(make_model(folder / "base", family))
    config = replace(config, quantization=resolved(config.quantization, quantization))
    model = DecoderModel(config, TPGroup(0, tp_size), torch.float32, CPU)
    if quantization is None:
        fill_randomly(model)
    return model


@pytest.mark.parametrize(
    ("family", "quantization", "tp_size", "are_set"),
    [
        ("llama3", None, 1, True),
        ("qwen2", None, 1, True),
        ("llama3", None, 2, False),
        ("llama3", "fp8", 1, False),
        ("mixtral", None, 1, False),
    ],
)
def test_only_plain_linears_of_a_whole_dense_model_have_shapes(
    tmp_path: Path, family: str, quantization: Method | None, tp_size: int, are_set: bool
) -> None:
    model = make(tmp_path, family, quantization, tp_size)
    linears = [linear for _, linear in model.packed_linears()]
    with own_linears(model, 8, gated_shape) as count:
        assert count == (len(linears) if are_set else 0)
        assert all((linear.shape is GATED) == are_set for linear in linears)
    assert all(linear.shape is None for linear in linears)


def test_shapes_are_chosen_by_size_and_rows_and_last_no_longer_than_the_block(tmp_path: Path) -> None:
    model = make(tmp_path, "llama3")
    asked = []

    def none_for_o(
        _device: torch.device, _dtype: torch.dtype, outputs: int, inputs: int, rows: int
    ) -> LinearShape | None:
        asked.append((outputs, inputs, rows))
        return None if outputs == inputs else GATED

    def fail_within() -> None:
        with own_linears(model, 8, none_for_o):
            for _, linear in model.packed_linears():
                outputs = sum(linear.out_features)
                assert (outputs, linear.in_features, 8) in asked
                assert linear.shape is (None if outputs == linear.in_features else GATED)
            raise KeyError

    with pytest.raises(KeyError):
        fail_within()
    assert all(linear.shape is None for _, linear in model.packed_linears())


def test_on_a_cpu_no_linear_has_a_shape(tmp_path: Path) -> None:
    with own_linears(make(tmp_path, "llama3"), 8) as count:
        assert count == 0


@pytest.mark.parametrize(("family", "is_gated"), [("llama3", True), ("qwen2", True), ("gemma2", False)])
def test_the_gated_kernel_serves_silu_alone(
    tmp_path: Path, family: str, is_gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = make(tmp_path, family), []
    mlp = next(model.decoder_layers()).mlp
    assert isinstance(mlp, MLP)
    x = torch.randn(3, model.config.hidden_size)
    want = mlp(x, None).y_TO
    gated_linear = mlp_module.gated_linear

    def counted(x: Tensor, w: Tensor, shape: LinearShape) -> Tensor:
        calls.append(shape)
        return gated_linear(x, w, shape)

    monkeypatch.setattr(mlp_module, "gated_linear", counted)
    with own_linears(model, 3, gated_shape):
        torch.testing.assert_close(mlp(x, None).y_TO, want)
    assert calls == ([GATED] if is_gated else [])


@pytest.mark.parametrize("family", ["llama3", "gemma2"])
def test_a_wide_shape_is_for_the_gated_kernel_alone(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(tmp_path, family)
    mlp = next(model.decoder_layers()).mlp
    assert isinstance(mlp, MLP)
    x = torch.randn(3, model.config.hidden_size)
    want = mlp(x, None).y_TO
    monkeypatch.setattr(layers_module, "split_linear", None)
    with own_linears(model, 200, lambda *_: LinearShape(gated=True, block_t=128)):
        torch.testing.assert_close(mlp(x, None).y_TO, want)


class TestOnGPU:
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("num_rows", [1, 16, 40, 100])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_a_graph_of_the_whole_model_agrees_with_cublas(
        self, tmp_path: Path, num_rows: int, dtype: torch.dtype
    ) -> None:
        device, context, block = torch.device("cuda"), 40, 16
        sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = read_model_config(make_model(tmp_path / "base", "llama3", **sizes, head_dim=128))
        model = DecoderModel(config, TPGroup(), dtype, device)
        fill_randomly(model)
        spec = attention_spec(config, block, dtype, dtype, device, {})
        per_row = -(-context // block)
        size = (num_rows * per_row, block, *spec.layers[0].kv_shape[:2])
        caches = [KVCache(*torch.randn(2, *size, device=device).to(dtype)) for _ in spec.layers]
        attention = make_attention(spec, caches, "triton")
        tables = [list(range(row * per_row, (row + 1) * per_row)) for row in range(num_rows)]
        attention.plan(AttentionBatch([1] * num_rows, [context] * num_rows, tables))
        rows = torch.arange(num_rows, device=device)
        last = torch.full_like(rows, context - 1)

        def captured(early: bool | None) -> Tensor:
            def shape_of(_device: object, _dtype: object, outputs: int, _inputs: int, _rows: int) -> LinearShape | None:
                if early is None:
                    return None
                gated = outputs == 2048
                splits = 1 if gated else 2
                if num_rows > MOST_SPLIT_ROWS:
                    return LinearShape(stages=3, early=early, gated=True, block_t=128) if gated else None
                return LinearShape(splits=splits, stages=4, prefetch=256, early=early, gated=gated)

            def step() -> Tensor:
                slots = rows * (per_row * block) + context - 1
                return model(rows % 7, last, last + 1, slots, caches, attention, None)

            stream = torch.cuda.Stream()
            with torch.inference_mode(), own_linears(model, num_rows, shape_of) as count:
                assert (count > 0) == (early is not None)
                with torch.cuda.stream(stream):
                    step()
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    out = step()
                for _ in range(5):
                    graph.replay()
            return out.clone()

        cublas, late, early = captured(None), captured(early=False), captured(early=True)
        assert torch.equal(late, early)
        error = (late.float() - cublas.float()).norm() / cublas.float().norm()
        assert error < (2e-2 if dtype == torch.bfloat16 else 3e-3)
