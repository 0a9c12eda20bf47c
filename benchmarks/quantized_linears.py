"""Compares an 8B model's linears with quantized and bf16 weights: milliseconds of all 32 layers' qkv, o, gate_up, down.

    python benchmarks/quantized_linears.py [--tokens 1 8 16 32 64 128 256] [--layers 4] [--kinds bf16 fp8 nf4 ...]
        [--peers marlin-int4 humming-int4 bitsandbytes-nf4 marlin-fp8 humming-fp8]

Weights are cold: each layer has its own, and the layers together are larger than the cache. Times are medians of the
replays of one CUDA graph, scaled to 32 layers. The floor is the weights' bytes divided by the copy bandwidth measured
in the same run. The number behind a time is the relative error of a layer's `down`, in thousandths, to the product of
x and the quantized values in float64; rounding the output to bf16 makes 1.7 of it.

fp8 has a scale for each row, as a scale for the whole tensor is held too; fp8-block one for 128 numbers of a row, as
blocks of 128 x 128 are held; fp8-group one for 32 numbers. Larger batches are rounded to e4m3; with -exact,
activations are never rounded. int4 has a scale for 128 numbers.

--peers: also times other projects' kernels for the same values, if those projects are installed
(benchmarks/quantized_peers.py). A peer's cell ends with our time divided by the peer's, for as many bits and
activations that are not rounded.
"""

from __future__ import annotations

import argparse
import itertools

import torch
from torch import Tensor

from engine_driver import copy_bandwidth
from lorafleet.kernels.decoder.decoder_stack import LINEARS, captured, medians
from lorafleet.kernels.decoder.scratch import Scratch
from lorafleet.kernels.quant.base_weight import BaseWeight, PlainWeight, Scheme
from lorafleet.kernels.quant.int_weight import ROUNDED_GROUP, IntScheme
from lorafleet.kernels.quant.nf4 import NF4Scheme
from lorafleet.kernels.quant.scaled_weight import ScaledScheme
from lorafleet.kernels.quant.tiled_weight import empty_weight
from quantized_peers import PEERS, PeerWeight

MODEL_LAYERS = 32
DTYPE, DEVICE = torch.bfloat16, torch.device("cuda")
SCHEMES: dict[str, Scheme] = {
    "fp8": ScaledScheme(),
    "fp8-exact": ScaledScheme(rounds_x=False),
    "fp8-block": ScaledScheme(block=128),
    "fp8-block-exact": ScaledScheme(block=128, rounds_x=False),
    "fp8-group-exact": ScaledScheme(block=32, rounds_x=False),
    "nf4": NF4Scheme(),
    "int4": IntScheme(4, ROUNDED_GROUP, dtype=DTYPE),
}


def make(kind: str, values_OD: Tensor, scratch: Scratch) -> tuple[BaseWeight | PeerWeight, Tensor]:
    """Returns the weight as the engine or the peer holds it, and its values."""
    if kind == "bf16":
        return PlainWeight(values_OD), values_OD
    if kind in PEERS:
        peer = PEERS[kind][1](values_OD)
        return peer, peer.values_OD
    outputs, inputs = values_OD.shape
    weight = empty_weight(SCHEMES[kind], outputs, inputs, DTYPE, DEVICE, scratch)
    matrix = SCHEMES[kind].quantize(values_OD)
    weight.fill(0, matrix, (slice(0, outputs), slice(0, inputs)))
    return weight, matrix[...]


def error(weight: BaseWeight | PeerWeight, x_TD: Tensor, values_OD: Tensor) -> float:
    exact_TO = x_TD.double() @ values_OD.double().T
    return float((weight.linear(x_TD, None) - exact_TO).norm() / exact_TO.norm())


def cell(kind: str, times: dict[str, float], errors: dict[str, float]) -> str:
    text = f"{times[kind]:6.2f} ({1e3 * errors[kind]:5.2f})"
    ours = times.get(PEERS[kind][0]) if kind in PEERS else None
    return text if ours is None else f"{text} {ours / times[kind]:.2f}x"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--kinds", nargs="+", choices=["bf16", *SCHEMES], default=["bf16", *SCHEMES])
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=[])
    args = parser.parse_args()
    kinds = [*args.kinds, *args.peers]
    scratch = Scratch(DTYPE, DEVICE)
    weights: dict[str, list[BaseWeight | PeerWeight]] = {kind: [] for kind in kinds}
    values_of_down: dict[str, Tensor] = {}
    for _, (inputs, outs) in itertools.product(range(args.layers), LINEARS.values()):
        values_OD = torch.randn(sum(outs), inputs, dtype=DTYPE, device=DEVICE) / inputs**0.5
        for kind in kinds:
            weight, values_of_down[kind] = make(kind, values_OD, scratch)  # the last linear is a `down`
            weights[kind].append(weight)
    bandwidth, scale = copy_bandwidth(), MODEL_LAYERS / args.layers
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e12:.2f} TB/s")
    for kind in kinds:
        size = scale * sum(p.nbytes for w in weights[kind] for p in w.parameters())
        print(f"{kind:>15}: {size / 2**30:.2f} GiB, floor {size / bandwidth * 1e3:.2f} ms")
    print("tokens  " + "  ".join(f"{kind:>15}" for kind in kinds))
    for tokens in args.tokens:
        x_of_size = {size: torch.randn(tokens, size, dtype=DTYPE, device=DEVICE) for size, _ in LINEARS.values()}

        def run(weights: list[BaseWeight | PeerWeight], x_of_size: dict[int, Tensor] = x_of_size) -> None:
            for weight, (size, _) in zip(weights, itertools.cycle(LINEARS.values()), strict=False):
                weight.linear(x_of_size[size], None)

        graphs = {kind: captured(lambda kind=kind: run(weights[kind])) for kind in kinds}
        times = {kind: scale * ms for kind, ms in medians(graphs, 12).items()}
        errors = {kind: error(weights[kind][-1], x_of_size[14336], values_of_down[kind]) for kind in kinds}
        print(f"{tokens:6}  " + "  ".join(f"{cell(kind, times, errors):>15}" for kind in kinds), flush=True)


if __name__ == "__main__":
    main()
