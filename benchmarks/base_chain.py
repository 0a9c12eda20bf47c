"""Measures the layers of a decode step without adapters: cuBLAS's linears against the tuned ones, on one GPU.

    python benchmarks/base_chain.py [--rows 1 8 16 32 64 128 256] [--layers 32] [--context 576]
        [--attention triton|flashinfer|auto] [--data FILE] [--json FILE]

The model is the engine's own decoder in the shape of an 8B Llama in bf16 with random weights, without its head. Each
way of computing the linears is one CUDA graph of all layers, whose weights are not in the cache. The ways take turns;
the figures are medians of replays:

- split: kernels/linear/split_linear.py, whose kernels begin when the one ahead has ended
- early: they begin before that (programmatic dependent launch)
- gated: SiLU times up in gate_up's kernel
- prefetch: each program requests the beginning of its weights before it waits

With more than 64 rows only gate_up has a kernel (kernels/linear/wide_gated_triton.py), which is always gated.

The shapes are those of --data, by default the engine's. Where it has none for this GPU, they are those from which
`python -m lorafleet.kernels.linear.tune_linear` starts. The errors are relative to the result of cuBLAS's linears after
all layers, and for each linear of the last layer to its product in float64.
"""

# T rows · D in · O out

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmark_results import Case, write_results
from engine_setup import llama_config
from lorafleet.kernels.decoder.decoder_stack import LINEARS, captured, medians
from lorafleet.kernels.decoder.gated_mul import gated_mul
from lorafleet.kernels.linear.linear_tuning import (
    MOST_SPLIT_ROWS,
    LinearShape,
    LinearShapes,
    choose_shape,
    measured_shapes_path,
    name_of,
    read_shapes,
)
from lorafleet.kernels.linear.split_linear import gated_linear, split_linear
from lorafleet.kernels.linear.tune_linear import starting_shape
from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.workers.attention.attention_backend import AttentionBackend, AttentionBatch, KVCache
from lorafleet.workers.attention.select import make_attention
from lorafleet.workers.attention_spec import attention_spec
from lorafleet.workers.bases.checkpoint import read_model_config
from lorafleet.workers.bases.weights import fill_randomly
from lorafleet.workers.models.decoder import DecoderModel
from lorafleet.workers.step.own_linears import own_linears
from lorafleet.workers.tp.group import TPGroup

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
BLOCK_SIZE = 16
REPEATS = 11
NAMES = {name_of(sum(outputs), inputs): name for name, (inputs, outputs) in LINEARS.items()}

Change = Callable[[LinearShape], LinearShape]
WAYS: dict[str, Change] = {
    "split": lambda shape: replace(shape, early=False, gated=False, prefetch=0),
    "split, early": lambda shape: replace(shape, early=True, gated=False, prefetch=0),
    "split, gated": lambda shape: replace(shape, early=False, prefetch=0),
    "split, gated, early": lambda shape: replace(shape, early=True, prefetch=0),
    "split, gated, early, prefetch": lambda shape: replace(shape, early=True, prefetch=1024),
    "as tuned": lambda shape: shape,
}
WIDE_WAYS: dict[str, Change] = {
    "gated": lambda shape: replace(shape, early=False),
    "gated, early": lambda shape: replace(shape, early=True),
    "as tuned": lambda shape: shape,
}


class Chain:
    """The model and its KV caches, which hold `context` tokens of each row."""

    def __init__(self, num_layers: int, most_rows: int, context: int, attention: str) -> None:
        shape = argparse.Namespace(hidden=4096, vocabulary=1024, layers=num_layers, device="cuda")
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(llama_config(shape, 2 * context)))
            config = read_model_config(Path(folder))
        self.model = DecoderModel(config, TPGroup(), DTYPE, DEVICE)
        fill_randomly(self.model)
        self._context = context
        self._blocks = -(-context // BLOCK_SIZE)
        spec = attention_spec(config, BLOCK_SIZE, DTYPE, DTYPE, DEVICE, {})
        size = (most_rows * self._blocks, BLOCK_SIZE, *spec.layers[0].kv_shape[:2])
        self._caches = [KVCache(_random(*size), _random(*size)) for _ in spec.layers]
        self._attention = make_attention(spec, self._caches, attention)  # type: ignore[arg-type]  # argparse checked it

    def planned(self, num_rows: int) -> AttentionBackend:
        backend = self._attention.for_graph(num_rows, self._context) or self._attention
        tables = [list(range(row * self._blocks, (row + 1) * self._blocks)) for row in range(num_rows)]
        backend.plan(AttentionBatch([1] * num_rows, [self._context] * num_rows, tables))
        return backend

    def graph(
        self, num_rows: int, attention: AttentionBackend, shapes: dict[str, LinearShape]
    ) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Returns the graph of a step in these shapes by name_of, and its output [T, D]. Other linears use cuBLAS."""
        rows = torch.arange(num_rows, device=DEVICE)
        last = torch.full_like(rows, self._context - 1)
        kv_slots = rows * (self._blocks * BLOCK_SIZE) + self._context - 1
        outputs = []

        def step() -> None:
            outputs.append(self.model(rows, last, last + 1, kv_slots, self._caches, attention, None))

        def shape_of(_device: object, _dtype: object, outputs: int, inputs: int, _rows: int) -> LinearShape | None:
            return shapes.get(name_of(outputs, inputs))

        with own_linears(self.model, num_rows, shape_of) as count:
            assert count == len(shapes) * self.model.config.num_layers
            graph = captured(step)
        return graph, outputs[-1]

    def errors(self, num_rows: int, shapes: dict[str, LinearShape]) -> dict[str, tuple[float, float]]:
        """Returns the errors of the last layer's linears, relative to their products in float64: cuBLAS's and ours."""
        found = {}
        for _, linear in self.model.packed_linears()[-len(LINEARS) :]:
            w_OD = linear.weight.dequantized()
            shape = shapes.get(name_of(*w_OD.shape))
            if shape is not None:
                x_TD = _random(num_rows, w_OD.shape[1])
                exact = x_TD.double() @ w_OD.double().T
                cublas_TO = linear.weight.linear(x_TD, None)
                if shape.is_wide:
                    gate, up = exact.chunk(2, dim=1)
                    exact = F.silu(gate) * up
                    both = gated_mul(LinearOutput(cublas_TO)), gated_linear(x_TD, w_OD, shape)
                else:
                    sums = split_linear(x_TD, w_OD, None, shape).sums
                    assert sums is not None
                    both = cublas_TO, sums.part_KTO.sum(0).to(DTYPE)
                cublas, ours = (_error(out, exact) for out in both)
                found[NAMES[name_of(*w_OD.shape)]] = (cublas, ours)
        return found


def _random(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=DTYPE, device=DEVICE).normal_()


def _error(out: Tensor, exact: Tensor) -> float:
    return ((out.double() - exact.double()).norm() / exact.double().norm()).item()


def shapes_of(data: LinearShapes, num_rows: int) -> dict[str, LinearShape]:
    """Returns the shapes of the linears by name_of, from the data or, without any, those from which tuning starts."""
    num_sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    if not data:
        found = {key: starting_shape(name, num_rows, num_sms, early=True) for key, name in NAMES.items()}
    else:
        found = {name_of(*size): choose_shape(data, *size, num_rows) for size in _sizes()}
    return {key: shape for key, shape in found.items() if shape is not None}


def _sizes() -> list[tuple[int, int]]:
    return [(sum(outputs), inputs) for inputs, outputs in LINEARS.values()]


def measure(chain: Chain, num_rows: int, shapes: dict[str, LinearShape]) -> Case:
    """Measures one number of rows, and prints it."""
    attention = chain.planned(num_rows)
    made = {"cuBLAS": chain.graph(num_rows, attention, {})}
    for way, change in (WAYS if num_rows <= MOST_SPLIT_ROWS else WIDE_WAYS).items():
        made[way] = chain.graph(num_rows, attention, {key: change(shape) for key, shape in shapes.items()})
    ms = medians({way: graph for way, (graph, _) in made.items()}, REPEATS)
    want = made["cuBLAS"][1]
    figures: dict[str, float | None] = {}
    print(f"{num_rows} rows:", flush=True)
    for way, (_, out) in made.items():
        error = _error(out, want)
        figures |= {f"{way} ms": ms[way], f"{way} error": error}
        ratio = ms[way] / ms["cuBLAS"]
        print(
            f"  {way:30} {ms[way]:7.3f} ms  {ms[way] - ms['cuBLAS']:+.3f}  x {ratio:.3f}  error {error:.1e}", flush=True
        )
    for name, (cublas, ours) in chain.errors(num_rows, shapes).items():
        figures |= {f"{name} cuBLAS error": cublas, f"{name} error": ours}
        print(f"  {name}: error against float64 {ours:.2e}, cuBLAS {cublas:.2e}", flush=True)
    return Case({"rows": num_rows}, figures)


@torch.inference_mode()
def main() -> None:
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", nargs="+", type=int, default=(1, 8, 16, 32, 64, 128, 256))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--context", type=int, default=576)
    parser.add_argument("--attention", choices=("triton", "flashinfer", "auto"), default="triton")
    parser.add_argument("--data", type=Path, help="a file of shapes; the default is the engine's for this GPU")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    data = read_shapes(args.data or measured_shapes_path(torch.cuda.get_device_name()))
    chain = Chain(args.layers, max(args.rows), args.context, args.attention)
    source = "tuned" if data else "not tuned: those that tuning starts from"
    print(f"{args.layers} layers, shapes {source}; {time.monotonic() - started:.0f} s to start", flush=True)
    cases = [measure(chain, num_rows, shapes_of(data, num_rows)) for num_rows in args.rows]
    print(f"{time.monotonic() - started:.0f} s", flush=True)
    units = {figure: "relative" if figure.endswith("error") else "ms" for case in cases for figure in case.figures}
    write_results(args.json, units, cases)


if __name__ == "__main__":
    main()
