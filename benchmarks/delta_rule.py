"""Measures the gated delta rule of one layer of a Qwen3.5-9B shape: microseconds of a step.

    python benchmarks/delta_rule.py [--steps 1x1 64x1 256x1 1x512 1x4096 4x2048 1x16384] [--json FILE]

A step of 4x2048 has four sequences of 2,048 tokens each, in bf16, with 32 heads of memories of 128 x 128. "one by one"
computes the tokens of every sequence one after another. "chunks" is what the engine runs: sequences of more than 16
tokens are computed by chunks. The floor is the time to read and write the memories, to read q, k, v and the gates and
to write the results, at 4.2 TB/s.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from benchmark_results import Case, write_results
from lorafleet.kernels.recurrent import delta_rule_triton
from lorafleet.kernels.recurrent.delta_rule import HeadGates
from lorafleet.kernels.recurrent.recurrent_batch import FEW_TOKENS, RecurrentBatch

HEADS, KEY_HEADS, DIM = 32, 16, 128
BYTES_PER_S = 4.2e12
REPEATS = 10
DEVICE = torch.device("cuda")


def median_us(call: Callable[[], object]) -> float:
    for _ in range(2):
        call()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def measure(sequences: int, tokens: int) -> Case:
    count, channels = sequences * tokens, (2 * KEY_HEADS + HEADS) * DIM
    qkv_TC = torch.randn(count, channels, device=DEVICE).bfloat16()
    b_TH, a_TH = torch.randn(2, count, HEADS, device=DEVICE).bfloat16()
    gates = HeadGates(b_TH, a_TH, torch.zeros(HEADS, device=DEVICE), torch.zeros(HEADS, device=DEVICE))
    memory_SHKV = torch.zeros(sequences, HEADS, DIM, DIM, device=DEVICE)
    batch = RecurrentBatch.build([tokens] * sequences, list(range(sequences)), [True] * sequences, DEVICE)

    def rule(of: RecurrentBatch) -> torch.Tensor:
        return delta_rule_triton.delta_rule_triton(qkv_TC, gates, memory_SHKV, KEY_HEADS, of)

    figures: dict[str, float | None] = {"engine_us": median_us(lambda: rule(batch))}
    by_chunks = rule(batch)
    delta_rule_triton.FEW_TOKENS = tokens
    one_by_one = replace(batch, long=None)
    figures["one_by_one_us"] = median_us(lambda: rule(one_by_one))
    expected = rule(one_by_one)
    delta_rule_triton.FEW_TOKENS = FEW_TOKENS
    figures["difference"] = ((by_chunks - expected).norm() / expected.norm()).item()
    read = 2 * (channels + 2 * HEADS + HEADS * DIM) * count + 8 * sequences * HEADS * DIM * DIM
    figures["floor_us"] = read / BYTES_PER_S * 1e6
    print(
        f"{sequences:4} x {tokens:5}: floor {figures['floor_us']:7.0f} us, one by one {figures['one_by_one_us']:7.0f}, "
        f"chunks {figures['engine_us']:7.0f}, relative difference {figures['difference']:.1e}",
        flush=True,
    )
    return Case({"sequences": sequences, "tokens": tokens}, figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", nargs="+", default=["1x1", "64x1", "256x1", "1x512", "1x4096", "4x2048", "1x16384"], metavar="BxT"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, {HEADS} heads of {DIM} x {DIM}, bf16")
    cases = [measure(*map(int, step.split("x"))) for step in args.steps]
    units = {"floor_us": "us", "one_by_one_us": "us", "engine_us": "us", "difference": "ratio"}
    write_results(args.json, units, cases)


if __name__ == "__main__":
    main()
