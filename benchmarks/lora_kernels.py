"""Measures the time that adapters add to the GEMMs of a decoder stack, on one GPU.

    python benchmarks/lora_kernels.py [--layers 32] [--lora-dtype bf16|fp8] [--json FILE]

The stack has the four packed linears of each layer of an 8B Llama in bf16, each with the kernel that reads its output
(rotation, add + norm, SiLU times up). Every layer has its own weights, so that none is in the cache, and all run in one
CUDA graph. The base (torch's linear) and the engine's linears with adapters take turns; the figures are medians of
replays. The floor is the bytes of the step's distinct adapters divided by the copy bandwidth of the same run. The goal
is 1.25 times the floor plus 0.15 ms. With --lora-dtype fp8 the adapters' A and B are e4m3.
"""

# T tokens · D in · O out

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmark_results import Case as Result
from benchmark_results import Value, write_results
from engine_driver import copy_bandwidth
from lorafleet.kernels.decoder.decoder_stack import (
    DTYPE,
    LINEARS,
    MAX_SLOTS,
    Stack,
    captured,
    medians,
    smallest_batch,
)
from lorafleet.kernels.lora.apply_lora import linear_with_lora
from lorafleet.kernels.lora.lora_batch import PREFILL_TILE_TOKENS, TILE_TOKENS, LoRABatch
from lorafleet.kernels.quant.fp8 import FP8

UNITS = dict.fromkeys(("base_ms", "lora_ms", "excess_ms", "floor_ms", "goal_ms"), "ms")
UNITS |= {"error": "largest relative error", "copy_bytes_per_s": "bytes/s"}
LORA_DTYPES = {"bf16": DTYPE, "fp8": FP8}


@dataclass(frozen=True)
class Case:
    name: str
    num_tokens: int
    num_adapters: int
    ranks: tuple[int, ...] = (16,)  # Adapter i has rank ranks[i % len(ranks)].

    @property
    def rank_of_slot(self) -> list[int]:
        return [self.ranks[i % len(self.ranks)] for i in range(MAX_SLOTS)]

    @property
    def is_prefill(self) -> bool:
        return self.num_tokens > 1024

    @property
    def slot_of_token(self) -> list[int]:
        """Assigns adapters to tokens: in turn for decode steps, as requests arrive, and in blocks for prefills."""
        if self.is_prefill:
            return [t * self.num_adapters // self.num_tokens for t in range(self.num_tokens)]
        return [t % self.num_adapters for t in range(self.num_tokens)]

    def adapter_bytes(self, lora_dtype: torch.dtype) -> int:
        a_and_b = sum(len(outs) * size + sum(outs) for size, outs in LINEARS.values())
        return lora_dtype.itemsize * a_and_b * sum(self.rank_of_slot[: self.num_adapters])


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


def check(stack: Stack, case: Case, x_of_size: dict[int, Tensor], batch: LoRABatch) -> float:
    """Returns the largest relative error of one layer's four outputs, compared with float64 on some rows."""
    worst = 0.0
    batch.begin()
    rows = sorted({0, case.num_tokens // 2, case.num_tokens - 1})
    for weight, packed in list(zip(stack.weights, stack.packed, strict=True))[: len(LINEARS)]:
        x = x_of_size[packed.in_features]
        out, delta, *_ = linear_with_lora(x, weight, None, packed, batch)
        y = out if delta is None else out.float() + delta.float()
        for t in rows:
            w = packed.slots[case.slot_of_token[t]]
            assert w is not None
            want = weight.dequantized().double() @ x[t].double()
            p = w.a_RD.double() @ x[t].double()
            if w.row_scale_R is not None:
                p *= w.row_scale_R
            want += torch.cat(
                [b.double() @ part for b, part in zip(w.b, p.split(w.ranks), strict=True) if b is not None]
            )
            error = float((y[t].double() - want).norm() / want.norm())
            assert math.isfinite(error)
            worst = max(worst, error)
    return worst


def measure(stack: Stack, case: Case, bandwidth: float) -> dict[str, float]:
    stack.load(case.rank_of_slot)
    x_of_size = stack.inputs(case.num_tokens)
    tile_tokens = PREFILL_TILE_TOKENS if case.is_prefill else TILE_TOKENS
    batch = smallest_batch(case.slot_of_token, case.rank_of_slot, stack.tables, tile_tokens)
    graphs = {
        "base": captured(lambda: stack.base(x_of_size)),
        "lora": captured(lambda: stack.with_lora(x_of_size, batch), batch.split.gemm_priority),
    }
    ms = medians(graphs, 7 if case.is_prefill else 21)
    floor = case.adapter_bytes(stack.lora_dtype) * stack.num_layers / bandwidth * 1e3
    return {
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
    parser.add_argument("--lora-dtype", choices=LORA_DTYPES, default="bf16")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    bandwidth = copy_bandwidth()
    stack = Stack(args.layers, LORA_DTYPES[args.lora_dtype])
    gpu = torch.cuda.get_device_name()
    print(f"{gpu}, copy {bandwidth / 1e12:.2f} TB/s, {args.layers} layers, {args.lora_dtype} adapters")
    names = " ".join(f"{name:>7}" for name in ("base", "+lora", "excess", "floor", "goal"))
    print(f"{'tokens x adapters, rank':30} {names}")
    results = []
    for case in CASES:
        row = measure(stack, case, bandwidth)
        settings: dict[str, Value] = {"case": case.name, "layers": args.layers, "lora_dtype": args.lora_dtype}
        results.append(Result(settings, row | {"copy_bytes_per_s": bandwidth}))
        numbers = " ".join(f"{row[k]:7.3f}" for k in ("base_ms", "lora_ms", "excess_ms", "floor_ms", "goal_ms"))
        print(f"{case.name:30} {numbers}  error {row['error']:.1e}", flush=True)
        torch.cuda.empty_cache()
    write_results(args.json, UNITS, results)


if __name__ == "__main__":
    main()
