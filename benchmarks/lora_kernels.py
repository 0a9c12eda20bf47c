"""What adapters add to the GEMMs of a decoder stack, on one GPU.

    python benchmarks/lora_kernels.py [--layers 32] [--json FILE]

The four packed linears of each layer of an 8B Llama, bf16, every layer with its own weights so that none is in the
cache, in one CUDA graph: base GEMMs alone (torch's linear) against the engine's linears with adapters, in turn; medians
of replays. Floor: the bytes of the step's distinct adapters over the copy bandwidth of the same run. Goal: 1.25 times
the floor and 0.15 ms.
"""

# T tokens · D in · O out

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from lorafleet.kernels.lora import linear_with_lora
from lorafleet.kernels.lora_batch import LoRABatch
from lorafleet.kernels.packed_lora import AdapterTable, LoRATables, PackedLoRA, SlotWeights

LINEARS = {
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate_up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}
MAX_SLOTS = 64
DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Case:
    name: str
    num_tokens: int
    num_adapters: int
    ranks: tuple[int, ...] = (16,)  # adapter i has ranks[i % len]

    @property
    def rank_of_slot(self) -> list[int]:
        return [self.ranks[i % len(self.ranks)] for i in range(MAX_SLOTS)]

    @property
    def slot_of_token(self) -> list[int]:
        """Decode: adapters take turns, as requests arrive. Prefill: one after another."""
        if self.num_tokens > 1024:
            return [t * self.num_adapters // self.num_tokens for t in range(self.num_tokens)]
        return [t % self.num_adapters for t in range(self.num_tokens)]

    @property
    def adapter_bytes(self) -> int:
        a_and_b = sum(len(outs) * size + sum(outs) for size, outs in LINEARS.values())
        return DTYPE.itemsize * a_and_b * sum(self.rank_of_slot[: self.num_adapters])


CASES = [
    Case("1x1 r16", 1, 1),
    Case("8x8 r16", 8, 8),
    Case("64x8 r16", 64, 8),
    Case("64x64 r16", 64, 64),
    Case("128x32 r16", 128, 32),
    Case("256x64 r16", 256, 64),
    Case("prefill 8x512, 8 adapters r16", 4096, 8),
    Case("64x32 r8,16,32,64", 64, 32, (8, 16, 32, 64)),
]


class Stack:
    """Random weights and adapters of `num_layers` layers. Zeros would run faster than real data."""

    def __init__(self, num_layers: int, names: tuple[str, ...] = tuple(LINEARS)) -> None:
        self.names = names
        self.num_layers = num_layers
        self.tables = LoRATables(num_layers * len(names), MAX_SLOTS, DEVICE)
        self.weights: list[Tensor] = []
        self.packed: list[PackedLoRA] = []
        for _, name in itertools.product(range(num_layers), names):
            size, outs = LINEARS[name]
            self.packed.append(PackedLoRA(len(self.packed), size, outs, self.tables))
            self.weights.append(_random(sum(outs), size, std=size**-0.5))
        self._ranks: list[int] = []

    def load(self, rank_of_slot: list[int]) -> None:
        if rank_of_slot == self._ranks:
            return
        self._ranks = rank_of_slot
        for slot, rank in enumerate(rank_of_slot):
            slot_weights: list[SlotWeights | None] = []
            for packed in self.packed:
                b = tuple(_random(out, rank, std=rank**-0.5) for out in packed.out_features)
                a = _random(rank * len(b), packed.in_features, std=packed.in_features**-0.5)
                weights = SlotWeights(a, b, (1.0,) * len(b))
                packed.set_slot(slot, weights)
                slot_weights.append(weights)
            self.tables.write_slot(slot, AdapterTable.of(slot_weights))

    def inputs(self, num_tokens: int) -> dict[int, Tensor]:
        return {size: _random(num_tokens, size, std=1.0) for size, _ in LINEARS.values()}

    def run(self, x_of_size: dict[int, Tensor], linear: Callable[[Tensor, Tensor, PackedLoRA], Tensor]) -> None:
        for weight, packed in zip(self.weights, self.packed, strict=True):
            linear(x_of_size[packed.in_features], weight, packed)


def _random(*shape: int, std: float) -> Tensor:
    return torch.empty(*shape, dtype=DTYPE, device=DEVICE).normal_(0, std)


def captured(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph


def medians(graphs: dict[str, torch.cuda.CUDAGraph], repeats: int) -> dict[str, float]:
    """Milliseconds of each; they take turns, so that a slower clock slows all."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for i in range(repeats + 2):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if i >= 2:
                times[name].append(start.elapsed_time(end))
    return {name: statistics.median(ms) for name, ms in times.items()}


def copy_bandwidth() -> float:
    """Bytes read and written a second."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    times: list[float] = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * source.numel() / statistics.median(times) * 1e3


def static_batch(case: Case) -> LoRABatch:
    batch = LoRABatch.static(case.num_tokens, MAX_SLOTS, max(case.ranks), DEVICE)
    batch.fill(case.slot_of_token, case.rank_of_slot)
    return batch


def check(stack: Stack, case: Case, x_of_size: dict[int, Tensor], batch: LoRABatch) -> float:
    """Largest relative error of one layer's four outputs, against float64 of some rows."""
    worst = 0.0
    rows = sorted({0, case.num_tokens // 2, case.num_tokens - 1})
    for weight, packed in list(zip(stack.weights, stack.packed, strict=True))[: len(stack.names)]:
        x = x_of_size[packed.in_features]
        y = linear_with_lora(x, weight, None, packed, batch)
        for t in rows:
            w = packed.slots[case.slot_of_token[t]]
            assert w is not None
            want = weight.double() @ x[t].double()
            p = (w.a_RD.double() @ x[t].double()).split(w.ranks)
            want += torch.cat([b.double() @ part for b, part in zip(w.b, p, strict=True) if b is not None])
            worst = max(worst, float((y[t].double() - want).norm() / want.norm()))
    return worst


def measure(stack: Stack, case: Case, bandwidth: float) -> dict[str, float | str]:
    stack.load(case.rank_of_slot)
    x_of_size = stack.inputs(case.num_tokens)
    batch = static_batch(case)
    graphs = {
        "base": captured(lambda: stack.run(x_of_size, lambda x, w, _: F.linear(x, w))),
        "lora": captured(lambda: stack.run(x_of_size, lambda x, w, p: linear_with_lora(x, w, None, p, batch))),
    }
    ms = medians(graphs, 7 if case.num_tokens > 1024 else 21)
    floor = case.adapter_bytes * stack.num_layers / bandwidth * 1e3
    return {
        "case": case.name,
        "base_ms": ms["base"],
        "lora_ms": ms["lora"],
        "excess_ms": ms["lora"] - ms["base"],
        "floor_ms": floor,
        "goal_ms": 1.25 * floor + 0.15,
        "error": check(stack, case, x_of_size, batch),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "lora_kernels.json")
    args = parser.parse_args()
    bandwidth = copy_bandwidth()
    stack = Stack(args.layers)
    gpu = torch.cuda.get_device_name()
    print(f"{gpu}, copy {bandwidth / 1e12:.2f} TB/s, {args.layers} layers")
    names = " ".join(f"{name:>7}" for name in ("base", "+lora", "excess", "floor", "goal"))
    print(f"{'tokens x adapters, rank':30} {names}")
    rows = []
    for case in CASES:
        row = measure(stack, case, bandwidth)
        rows.append(row)
        numbers = " ".join(f"{row[k]:7.3f}" for k in ("base_ms", "lora_ms", "excess_ms", "floor_ms", "goal_ms"))
        print(f"{case.name:30} {numbers}  error {row['error']:.1e}", flush=True)
        torch.cuda.empty_cache()
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({"gpu": gpu, "copy_bytes_per_s": bandwidth, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
