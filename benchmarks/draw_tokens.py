"""Measures the kernel that chooses tokens, for each combination of sampling fields.

    python benchmarks/draw_tokens.py [--batches 1 8 64 256] [--vocabulary 128256] [--spreads 1.3 4] [--json FILE]

Logits are normal with each of the given standard deviations: 1.3 is that of a model with random weights, whose top_p
keeps half of the vocabulary. The floor is the time to read the logits once, by a copy of as many bytes. Figures are
medians in microseconds, timed by events, with the launches of one call queued behind each other.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import triton.testing
from torch import Tensor

from benchmark_results import Case, write_results
from lorafleet.kernels.sampling import draw_tokens_triton
from lorafleet.kernels.sampling.draw_tokens import NEVER, NUM_FIELDS, DrawFields

# Temperature, top_k, top_p, logarithm of min_p, and whether there are penalties.
CASES: dict[str, tuple[float, int, float, float, bool]] = {
    "greedy": (0.0, 0, 1.0, NEVER, False),
    "temperature": (0.8, 0, 1.0, NEVER, False),
    "min_p": (0.8, 0, 1.0, -3.0, False),
    "top_k 20": (0.8, 20, 1.0, NEVER, False),
    "top_p .9": (0.8, 0, 0.9, NEVER, False),
    "top_k 20, top_p .9": (0.8, 20, 0.9, NEVER, False),
    "top_p .9, penalties": (0.8, 0, 0.9, NEVER, True),
}


def make_table(num_rows: int, vocabulary: int, case: str) -> Tensor:
    temperature, top_k, top_p, log_min_p, penalizes = CASES[case]
    draws = torch.rand(num_rows, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).tolist()
    penalties = (1.1, 0.5, 0.5) if penalizes else (1.0, 0.0, 0.0)
    rows = [
        DrawFields(
            temperature, top_k or vocabulary, top_p, log_min_p, draw, vocabulary - 1, i if penalizes else -1, *penalties
        )
        for i, draw in enumerate(draws)
    ]
    return torch.tensor(rows, dtype=torch.float64).cuda()


def measure(num_rows: int, vocabulary: int, spread: float, case: str) -> float:
    generator = torch.Generator(device="cuda").manual_seed(0)
    logits_BV = torch.randn(num_rows, vocabulary, device="cuda", generator=generator).mul(spread).bfloat16()
    table_BF = make_table(num_rows, vocabulary, case)
    assert table_BF.shape[1] == NUM_FIELDS
    penalizes = CASES[case][-1]
    counts_SV = torch.zeros((num_rows if penalizes else 0, vocabulary), dtype=torch.int32, device="cuda")
    counts_SV[:, :2000] = 1

    def call() -> Tensor:
        return draw_tokens_triton.draw_tokens_triton(logits_BV, table_BF, counts_SV, penalizes=penalizes)

    return float(triton.testing.do_bench(call, warmup=20, rep=60, return_mode="median")) * 1e3


def measure_floor(num_rows: int, vocabulary: int) -> float:
    """Returns the time to read a bf16 tensor of this size: a copy of half of it reads and writes as many bytes."""
    half = torch.empty(num_rows * vocabulary // 2, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(half)
    return float(triton.testing.do_bench(lambda: target.copy_(half), return_mode="median")) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--spreads", type=float, nargs="+", default=[1.3, 4.0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, us a call", flush=True)
    results: list[Case] = []
    for spread in args.spreads:
        for case in CASES:
            found = {batch: measure(batch, args.vocabulary, spread, case) for batch in args.batches}
            for batch, us in found.items():
                settings = {"case": case, "batch": batch, "spread": spread, "vocabulary": args.vocabulary}
                results.append(Case(settings, {"us": us}))
            print(f"spread {spread:<4g} {case:<22}", *(f"{us:8.1f}" for us in found.values()), flush=True)
    floors = [measure_floor(batch, args.vocabulary) for batch in args.batches]
    print(f"{'one read of the logits':<34}", *(f"{us:8.1f}" for us in floors))
    write_results(args.json, {"us": "microseconds, median"}, results)


if __name__ == "__main__":
    main()
