"""Compares an 8B model's linears with quantized and bf16 weights: milliseconds of all 32 layers' qkv, o, gate_up, down.

    python benchmarks/quantized_linears.py [--tokens 1 8 64 128 256 4096] [--layers 8]

Weights are cold: each layer has its own, and the layers together are larger than the cache. Times are medians of the
replays of one CUDA graph, scaled to 32 layers. The floor is the weights' bytes divided by the copy bandwidth measured
in the same run.
"""

from __future__ import annotations

import argparse
import itertools

import torch
from torch import Tensor

from engine_driver import copy_bandwidth
from lorafleet.kernels.decoder.decoder_stack import LINEARS, captured, medians
from lorafleet.kernels.decoder.scratch import Scratch
from lorafleet.kernels.quant.base_weight import BaseWeight, PlainWeight
from lorafleet.kernels.quant.fp8_weight import FP8Weight, quantize_rows
from lorafleet.kernels.quant.nf4 import NF4Weight, quantize

MODEL_LAYERS = 32
DTYPE, DEVICE = torch.bfloat16, torch.device("cuda")


def make(kind: str, values_OD: Tensor, scratch: Scratch) -> BaseWeight:
    outputs, inputs = values_OD.shape
    whole = slice(0, outputs), slice(0, inputs)
    if kind == "bf16":
        return PlainWeight(values_OD)
    if kind == "fp8":
        fp8 = FP8Weight(outputs, inputs, DTYPE, DEVICE)
        fp8.fill(0, quantize_rows(values_OD), whole)
        return fp8
    nf4 = NF4Weight(outputs, inputs, DTYPE, DEVICE, scratch)
    nf4.fill(0, quantize(values_OD), whole)
    return nf4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 128, 256, 4096])
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()
    scratch = Scratch(DTYPE, DEVICE)
    kinds: dict[str, list[BaseWeight]] = {kind: [] for kind in ("bf16", "fp8", "nf4")}
    for _, (inputs, outs) in itertools.product(range(args.layers), LINEARS.values()):
        values_OD = torch.randn(sum(outs), inputs, dtype=DTYPE, device=DEVICE) / inputs**0.5
        for kind, weights in kinds.items():
            weights.append(make(kind, values_OD, scratch))
    bandwidth, scale = copy_bandwidth(), MODEL_LAYERS / args.layers
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e12:.2f} TB/s")
    sizes = {kind: scale * sum(p.nbytes for w in weights for p in w.parameters()) for kind, weights in kinds.items()}
    print(
        "  ".join(
            f"{kind}: {size / 2**30:.2f} GiB, floor {size / bandwidth * 1e3:.2f} ms" for kind, size in sizes.items()
        )
    )
    print("tokens  " + "  ".join(f"{kind:>7}" for kind in kinds))
    for tokens in args.tokens:
        x_of_size = {size: torch.randn(tokens, size, dtype=DTYPE, device=DEVICE) for size, _ in LINEARS.values()}

        def run(weights: list[BaseWeight], x_of_size: dict[int, Tensor] = x_of_size) -> None:
            for weight, (size, _) in zip(weights, itertools.cycle(LINEARS.values()), strict=False):
                weight.linear(x_of_size[size], None)

        graphs = {kind: captured(lambda weights=weights: run(weights)) for kind, weights in kinds.items()}
        times = medians(graphs, 20)
        print(f"{tokens:6}  " + "  ".join(f"{scale * times[kind]:7.2f}" for kind in kinds), flush=True)


if __name__ == "__main__":
    main()
