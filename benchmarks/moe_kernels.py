"""The experts of a mixture on one GPU, layer after layer, beside the bytes that they must read.

    python benchmarks/moe_kernels.py [--layers 4] [--shapes]

Layers of Qwen3-30B-A3B's shape (128 experts, 8 a token, hidden 2048, intermediate 768), bf16, each with weights of its
own so that none is in the cache, in one CUDA graph: router, choice, experts, sum. Tokens choose at random. Floor: the
bytes of the experts that are chosen and the router's over the copy bandwidth of the same run; for prompts the FLOP at
800 TFLOP/s where that is more. --shapes tries other tile shapes for each number of tokens too.
"""

# T tokens · E experts · D hidden size · I intermediate size

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_driver import copy_bandwidth
from lorafleet.kernels import moe_triton
from lorafleet.kernels.moe import experts_mlp, route

EXPERTS, PER_TOKEN, HIDDEN, INNER = 128, 8, 2048, 768
DTYPE = torch.bfloat16
TOKENS = (1, 8, 64, 256, 2048, 8192)
FLOPS = 800e12
DECODE = tuple(product((16,), (32, 64, 128), (128, 256), (4,), (3, 4)))
PREFILL = tuple(product((64, 128), (128, 256), (64,), (4, 8), (3, 4)))
TRIED = {
    1: DECODE,
    8: DECODE,
    64: DECODE,
    256: (*DECODE[4:8], *product((32, 64), (64, 128), (64, 128), (4,), (4,))),
    2048: PREFILL,
    8192: PREFILL,
}


class Layers:
    def __init__(self, count: int) -> None:
        def random(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=DTYPE, device="cuda").normal_(std=0.02)

        self.weights = [
            (random(EXPERTS, HIDDEN), random(EXPERTS, 2 * INNER, HIDDEN), random(EXPERTS, HIDDEN, INNER))
            for _ in range(count)
        ]

    def run(self, x_TD: Tensor) -> Tensor:
        for gate_ED, gate_up_E2ID, down_EDI in self.weights:
            routing = route(F.linear(x_TD, gate_ED), PER_TOKEN, sums_to_one=True)
            out_TD = experts_mlp(x_TD, routing, gate_up_E2ID, down_EDI)
        return out_TD

    def floor_ms(self, x_TD: Tensor, bandwidth: float) -> float:
        """Of all layers."""
        read = 0
        for gate_ED, gate_up_E2ID, down_EDI in self.weights:
            chosen = route(F.linear(x_TD, gate_ED), PER_TOKEN, sums_to_one=True).expert_TK.unique()
            read += gate_ED.nbytes + len(chosen) * (gate_up_E2ID[0].nbytes + down_EDI[0].nbytes)
        flop = len(self.weights) * len(x_TD) * PER_TOKEN * 6 * HIDDEN * INNER
        return 1e3 * max(read / bandwidth, flop / FLOPS)


def graph_ms(run: Callable[[], object], repeats: int) -> float:
    """Median of a captured graph's replays."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--shapes", action="store_true")
    arguments = parser.parse_args()
    layers, bandwidth = Layers(arguments.layers), copy_bandwidth()
    own = moe_triton._SHAPES
    print(f"{torch.cuda.get_device_name()}, copies {bandwidth / 1e12:.2f} TB/s, {arguments.layers} layers", flush=True)
    for num_tokens in TOKENS:
        x_TD = torch.randn(num_tokens, HIDDEN, dtype=DTYPE, device="cuda")
        moe_triton._SHAPES = own
        floor = layers.floor_ms(x_TD, bandwidth) / arguments.layers
        found = graph_ms(lambda x=x_TD: layers.run(x), 12) / arguments.layers
        print(f"{num_tokens:5} tokens: {found:7.3f} ms a layer, floor {floor:7.3f}", flush=True)
        tried: list[tuple[float, moe_triton._Shape]] = []
        for values in TRIED[num_tokens] if arguments.shapes else ():
            shape = moe_triton._Shape(*values)
            moe_triton._SHAPES = ((float("inf"), shape),)
            try:
                tried.append((graph_ms(lambda x=x_TD: layers.run(x), 7) / arguments.layers, shape))
            except Exception as error:  # no shared memory for so many stages
                torch.cuda.synchronize()
                print("      ", values, type(error).__name__, flush=True)
        for ms, shape in sorted(tried, key=lambda one: one[0])[:4]:
            print(f"      {ms:7.3f} {shape}", flush=True)


if __name__ == "__main__":
    main()
