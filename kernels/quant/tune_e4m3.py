"""Measures the launch shapes of the e4m3 GEMM on this machine's GPU, and the batches for which it is the fastest.

    python -m lorafleet.kernels.quant.tune_e4m3 [--seconds 240] [--layers 4]

The linears are those of an 8B Llama with cold weights. Each class of products (kernels/quant/e4m3_tuning.py) starts
from the shape of the file or the default. One field is changed at a time, and the change is adopted if the class gets
faster by more than the noise. Every class has an equal share of the time that is left, most of which the compiler
takes. Then the ways to multiply are compared at each size of batch. The file is written after each class.
"""

# T tokens · D in · O out

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.errors import OutOfResources

from lorafleet.kernels.decoder.decoder_stack import DEVICE, DTYPE, LINEARS, captured, medians
from lorafleet.kernels.decoder.scratch import Scratch
from lorafleet.kernels.quant.e4m3_linear_triton import e4m3_linear_triton
from lorafleet.kernels.quant.e4m3_tuning import (
    TOKEN_CLASSES,
    WIDE_OUTPUTS,
    E4M3Limits,
    E4M3Shape,
    E4M3Tuning,
    class_name,
    e4m3_tuning,
    save,
)
from lorafleet.kernels.quant.fp8 import FP8
from lorafleet.kernels.quant.scaled_linear_triton import dequantize_codes_triton
from lorafleet.kernels.quant.scaled_weight import ScaledScheme, ScaledWeight

MEASURED_TOKENS = {16: 8}  # tokens that are measured for a class, if not the most that it has
NOISE = 0.005  # as a fraction of a class's time
ROUNDING_GAIN = 0.1  # x is rounded where that saves more than this fraction of the time
FIELDS: dict[str, tuple[Any, ...]] = {
    "prefetch": (0, 256, 512, 1024, 2048),
    "splits_inside": (False, True),
    "programs": (132, 264, 396, 528, 792),
    "block_o": (64, 128, 256),
    "stages": (3, 4, 5, 6, 8),
    "warps": (4, 8, 16),
    "block_t": (16, 32, 64, 128),
}


class TunedLinears:
    """Random e4m3 linears of all layers, with one scale for each row."""

    def __init__(self, num_layers: int) -> None:
        self.scratch = Scratch(DTYPE, DEVICE)
        self.weights: list[ScaledWeight] = []
        for _, (inputs, outs) in itertools.product(range(num_layers), LINEARS.values()):
            weight = ScaledScheme().empty(sum(outs), inputs, DTYPE, DEVICE, self.scratch)
            for first in range(0, sum(outs), 4096):  # random numbers take four times the codes' memory
                rows = weight.code_OD[first : first + 4096]
                rows.copy_(torch.randn(rows.shape, device=DEVICE).mul_(60).clamp_(-448, 448).to(FP8))
            weight.scale_OG.fill_(inputs**-0.5 / 60)
            self.scratch.reserve(weight.code_OD.numel())
            self.weights.append(weight)

    def of_width(self, is_wide: bool) -> list[ScaledWeight]:
        return [weight for weight in self.weights if (weight.num_outputs >= WIDE_OUTPUTS) == is_wide]

    def e4m3(
        self, weights: list[ScaledWeight], num_tokens: int, rounds_x: bool, shape: E4M3Shape | None
    ) -> Callable[[], None]:
        """Returns the products by the e4m3 GEMM with this shape, or with each class's tuned one."""
        arrived_M = self.scratch.arrived_M

        def linear(x_TD: Tensor, weight: ScaledWeight) -> Tensor:
            return e4m3_linear_triton(x_TD, weight.code_OD, weight.scale_OG, None, arrived_M, rounds_x, shape)

        return self._products(weights, num_tokens, linear)

    def row_wise(self, num_tokens: int) -> Callable[[], None]:
        """Returns the products by torch's e4m3 GEMM, with x rounded by token."""
        for weight in self.weights:
            weight.pair_tokens = 0
        return self._products(self.weights, num_tokens, lambda x_TD, weight: weight.linear(x_TD, None))

    def plain(self, num_tokens: int) -> Callable[[], None]:
        """Returns the products by cuBLAS, with the values of W written before each."""

        def linear(x_TD: Tensor, weight: ScaledWeight) -> Tensor:
            values_OD = self.scratch.view(*weight.code_OD.shape)
            return F.linear(x_TD, dequantize_codes_triton(weight.code_OD, weight.scale_OG, values_OD))

        return self._products(self.weights, num_tokens, linear)

    @staticmethod
    def _products(
        weights: list[ScaledWeight], num_tokens: int, linear: Callable[[Tensor, ScaledWeight], Tensor]
    ) -> Callable[[], None]:
        sizes = {weight.code_OD.shape[1] for weight in weights}
        x_of_size = {size: torch.randn(num_tokens, size, dtype=DTYPE, device=DEVICE) for size in sizes}

        def run() -> None:
            for weight in weights:
                linear(x_of_size[weight.code_OD.shape[1]], weight)

        return run


def candidates(shape: E4M3Shape, num_tokens: int, rounds_x: bool) -> list[E4M3Shape]:
    """Returns every shape that differs from the given one in one field and suits so many tokens."""
    changed = [replace(shape, **{field: value}) for field, values in FIELDS.items() for value in values]
    return [
        one
        for one in changed
        if one.block_t < 2 * max(16, num_tokens)
        and one.block_t * 4 >= min(128, num_tokens)
        and one.block_o * one.block_t <= 128 * 128
        and one.block_o >= 16 * one.warps  # each warp has 16 rows
        and not (one.splits_inside and rounds_x)
    ]


def tune(
    linears: TunedLinears, tuning: E4M3Tuning, tokens: int, is_wide: bool, rounds_x: bool, seconds: float
) -> E4M3Shape:
    """Returns the best shape for one class that is found in the time."""
    end = time.monotonic() + seconds
    num_tokens, weights = MEASURED_TOKENS.get(tokens, tokens), linears.of_width(is_wide)
    best = tuning.shape(num_tokens, weights[0].num_outputs, rounds_x)
    tried, improved = {best}, True
    while improved:
        improved = False
        for i in range(len(candidates(best, num_tokens, rounds_x))):
            remaining = candidates(best, num_tokens, rounds_x)  # derived from the best so far, which changes
            if i >= len(remaining) or remaining[i] in tried:
                continue
            if time.monotonic() > end:
                return best
            tried.add(remaining[i])
            # The best so far alternates with each candidate, so that a slower clock slows both.
            shapes = {"best": best, "candidate": remaining[i]}
            try:
                ms = medians(
                    {key: captured(linears.e4m3(weights, num_tokens, rounds_x, one)) for key, one in shapes.items()}, 7
                )
            except OutOfResources:
                continue
            if ms["candidate"] < ms["best"] * (1 - NOISE):
                best, improved = remaining[i], True
    return best


def measured_times(linears: TunedLinears, tokens: int) -> dict[str, float]:
    """Returns the milliseconds of all linears by each way."""
    ways = {
        "exact": linears.e4m3(linears.weights, tokens, False, None),
        "rounded": linears.e4m3(linears.weights, tokens, True, None),
        "row-wise": linears.row_wise(tokens),
        "plain": linears.plain(tokens),
    }
    return medians({name: captured(run) for name, run in ways.items()}, 9)


def limits_of(times: dict[int, dict[str, float]]) -> E4M3Limits:
    """Returns up to which size of batch each way is used, by the milliseconds of measured_times for each size."""
    exact_tokens = rounded_tokens = pair_tokens = 0
    for tokens, ms in times.items():
        if ms["exact"] * (1 - ROUNDING_GAIN) <= min(ms["rounded"], ms["row-wise"]):
            exact_tokens = tokens
        if min(ms["exact"], ms["rounded"]) < ms["row-wise"]:
            rounded_tokens = tokens
        if ms["exact"] < ms["plain"]:
            pair_tokens = tokens
    return E4M3Limits(exact_tokens, max(exact_tokens, rounded_tokens), pair_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=240.0, help="time for the shapes; the limits take some more")
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    linears, tuning, gpu = TunedLinears(args.layers), e4m3_tuning(DEVICE), torch.cuda.get_device_name()
    classes = [
        (tokens, is_wide, rounds_x)
        for tokens in TOKEN_CLASSES
        for rounds_x in (False, True)
        for is_wide in (False, True)
        if (tokens > TOKEN_CLASSES[0] if rounds_x else tokens < TOKEN_CLASSES[-1])
    ]
    end = time.monotonic() + args.seconds
    for index, (tokens, is_wide, rounds_x) in enumerate(classes):
        name = class_name(tokens, WIDE_OUTPUTS if is_wide else 1, rounds_x)
        share = (end - time.monotonic()) / (len(classes) - index)
        shape = tune(linears, tuning, tokens, is_wide, rounds_x, share)
        tuning = E4M3Tuning(tuning.limits, {**tuning.shapes, name: shape})
        print(f"{name}: {shape}", "->", save(gpu, tuning), flush=True)
    times = {tokens: measured_times(linears, tokens) for tokens in TOKEN_CLASSES}
    for tokens, ms in times.items():
        print(f"{tokens} tokens:", {name: round(value, 3) for name, value in ms.items()})
    print(limits_of(times), "->", save(gpu, E4M3Tuning(limits_of(times), tuning.shapes)))


if __name__ == "__main__":
    main()
