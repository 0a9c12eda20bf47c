"""Times an 8B model's linears with weights of four bits, by each kernel: milliseconds of all 32 layers' linears.

    python benchmarks/four_bit_linears.py [--schemes nf4 awq] [--tokens 1 8 16 32 64] [--triton-tokens] [--layers 8]

Weights are cold: each layer has its own, and the layers together are larger than the cache. Times are medians of the
replays of one CUDA graph, scaled to 32 layers. The floor is the weights' bytes divided by the copy bandwidth measured
in the same run. "served" is what TiledWeight chooses, "values" writes the values and calls cuBLAS, and "triton" is the
scheme's own weight, which serves GPUs without the CUDA kernels. The others are kernels. A kernel for half of the tokens
is launched twice. The fastest kernel of each line is named at its end. The largest relative error of each, compared
with a product in float64, comes last.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_driver import copy_bandwidth
from lorafleet.kernels.decoder.decoder_stack import LINEARS, captured, medians
from lorafleet.kernels.decoder.scratch import Scratch
from lorafleet.kernels.quant.base_weight import PlainWeight, QuantizedMatrix, QuantizedWeight, Scheme
from lorafleet.kernels.quant.four_bit_cuda import (
    FourBitKernels,
    KernelShape,
    four_bit_kernels,
    four_bit_values,
    launch,
)
from lorafleet.kernels.quant.int_weight import IntMatrix, IntScheme, round_to_nearest
from lorafleet.kernels.quant.nf4 import NF4Scheme
from lorafleet.kernels.quant.tiled_weight import TiledWeight, tiled_weight

MODEL_LAYERS = 32
GROUP = 128
DTYPE, DEVICE = torch.bfloat16, torch.device("cuda")
SCHEMES: dict[str, Scheme] = {
    "nf4": NF4Scheme(),
    "awq": IntScheme(4, GROUP, True, 0, torch.float16),  # with zeros
    "gptq": IntScheme(4, GROUP, False, 0, torch.float16),  # symmetric
}
Work = Callable[[Tensor, int], Tensor]


def matrix_of(scheme: Scheme, values_OD: Tensor) -> QuantizedMatrix:
    if not isinstance(scheme, IntScheme):
        return scheme.quantize(values_OD)
    matrix = round_to_nearest(values_OD.half(), 4, GROUP)
    zero_OG = torch.randint(6, 11, matrix.scale_OG.shape, device=DEVICE, dtype=torch.uint8)
    return IntMatrix(matrix.code_OD, matrix.scale_OG, zero_OG if scheme.has_zeros else None, matrix.group_D, 4)


def fill(weight: QuantizedWeight, matrix: QuantizedMatrix) -> None:
    outputs, inputs = matrix.get_shape()
    weight.fill(0, matrix, (slice(0, outputs), slice(0, inputs)))


def candidates(tokens: int, kernels: FourBitKernels) -> list[KernelShape]:
    """Returns the kernels that may be the fastest for a number of tokens."""
    return [
        shape for shape in kernels.shapes if tokens <= 2 * shape.launch_tokens and shape.tokens <= max(32, 2 * tokens)
    ]


class Weights:
    """All layers' linears of one scheme, for the CUDA kernels and, if they are compared, for Triton's."""

    def __init__(self, scheme: Scheme, has_triton: bool) -> None:
        self._scheme = scheme
        self._scratch = Scratch(DTYPE, DEVICE)
        self.tiled: list[TiledWeight] = []
        self.triton: list[QuantizedWeight] = []
        self._has_triton = has_triton

    def add(self, values_OD: Tensor) -> None:
        (outputs, inputs), matrix = values_OD.shape, matrix_of(self._scheme, values_OD)
        tiled = tiled_weight(self._scheme, outputs, inputs, DTYPE, DEVICE, self._scratch)
        assert tiled is not None, "this machine has no CUDA kernels: see the warning above"
        fill(tiled, matrix)
        self.tiled.append(tiled)
        if self._has_triton:
            plain = self._scheme.empty(outputs, inputs, DTYPE, DEVICE, self._scratch)
            fill(plain, matrix)
            self.triton.append(plain)

    @property
    def nbytes(self) -> int:
        return sum(parameter.nbytes for weight in self.tiled for parameter in weight.parameters())

    def works(self, tokens: int, triton_tokens: list[int]) -> dict[str, Work]:
        """Returns the function of each column, which multiplies the linear of an index."""
        kernels = four_bit_kernels(self.tiled[0].variant, DEVICE)
        assert kernels is not None
        found: dict[str, Work] = {"served": lambda x, i: self.tiled[i].linear(x, None)}
        for shape in candidates(tokens, kernels):
            found[shape.name] = self._by_shape(kernels, shape)
        if tokens >= 64:
            found["values"] = lambda x, i: F.linear(x, self._values(i, kernels))
        if self._has_triton and tokens in triton_tokens:
            found["triton"] = lambda x, i: self.triton[i].linear(x, None)
        return found

    def _by_shape(self, kernels: FourBitKernels, shape: KernelShape) -> Work:
        return lambda x, i: launch(x, self.tiled[i], None, kernels, shape)

    def _values(self, index: int, kernels: FourBitKernels) -> Tensor:
        weight = self.tiled[index]
        return four_bit_values(weight, self._scratch.view(weight.num_outputs, weight.num_inputs), 0, kernels)


def run(work: Work, count: int, x_of_size: dict[int, Tensor]) -> None:
    for index, (size, _) in zip(range(count), itertools.cycle(LINEARS.values()), strict=False):
        work(x_of_size[size], index)


def error(work: Work, weights: Weights, x_of_size: dict[int, Tensor]) -> float:
    """Returns the largest relative error among the linears of one layer."""
    errors = []
    for index, (size, _) in enumerate(LINEARS.values()):
        x, weight = x_of_size[size], weights.tiled[index]
        want = x.double() @ weight.dequantized().double().T
        errors.append(float((work(x, index).double() - want).norm() / want.norm()))
    return max(errors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 16, 32, 64])
    parser.add_argument("--triton-tokens", type=int, nargs="*", default=[])
    parser.add_argument("--schemes", nargs="+", choices=list(SCHEMES), default=["nf4", "awq"])
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()
    begin = time.monotonic()
    all_weights = {name: Weights(SCHEMES[name], bool(args.triton_tokens)) for name in args.schemes}
    plain: list[PlainWeight] = []
    for _, (inputs, outs) in itertools.product(range(args.layers), LINEARS.values()):
        values_OD = torch.randn(sum(outs), inputs, dtype=DTYPE, device=DEVICE) / inputs**0.5
        plain.append(PlainWeight(values_OD))
        for weights in all_weights.values():
            weights.add(values_OD)
    bandwidth, scale = copy_bandwidth(), MODEL_LAYERS / args.layers
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e12:.2f} TB/s")
    for name, weights in all_weights.items():
        nbytes = scale * weights.nbytes
        print(f"{name}: {nbytes / 2**30:.2f} GiB, floor {nbytes / bandwidth * 1e3:.2f} ms")
        errors: dict[str, float] = {}
        for tokens in args.tokens:
            x_of_size = {size: torch.randn(tokens, size, dtype=DTYPE, device=DEVICE) for size, _ in LINEARS.values()}
            works = weights.works(tokens, args.triton_tokens)
            for column, work in works.items():
                errors[column] = max(errors.get(column, 0.0), error(work, weights, x_of_size))
            works["bf16"] = lambda x, i: plain[i].linear(x, None)
            graphs = {
                column: captured(lambda work=work, x=x_of_size: run(work, len(plain), x))
                for column, work in works.items()
            }
            times = {column: scale * ms for column, ms in medians(graphs, 10).items()}
            kernels = [column for column in times if column not in ("bf16", "served")]
            row = "  ".join(f"{column} {ms:.2f}" for column, ms in times.items())
            print(f"{tokens:3} tokens: {row}  -> {min(kernels, key=times.__getitem__)}", flush=True)
        print("errors: " + "  ".join(f"{column} {largest:.5f}" for column, largest in errors.items()))
    print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
