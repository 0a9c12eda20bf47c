"""Measures the experts of a mixture on one GPU, layer after layer, against the bytes that they must read.

    python benchmarks/moe_kernels.py [--layers 4] [--rank 16] [--tokens 64 8192] [--kernels] [--tiles] [--shapes]
        [--quantization nf4 int4 mxfp4 fp8] [--triton] [--few-tokens]

Layers have Qwen3-30B-A3B's shape (128 experts, 8 per token, hidden 2048, intermediate 768) in bf16. Each layer has its
own weights, so that none is in the cache. One CUDA graph runs router, choice, experts and sum. Tokens choose at random.
The floor is the bytes of the chosen experts and of the router divided by the copy bandwidth of the same run; for
prompts it is the FLOP at 800 TFLOP/s if that takes longer. The same is measured with 8 adapters on all experts, with
the bytes of their chosen experts' A and B. Their tokens alternate (decode) or follow one another (prompts). --rank 0
leaves adapters out. --quantization quantizes the experts. --triton multiplies codes of four bits by the Triton kernel,
which serves GPUs without the CUDA kernels. --few-tokens measures the kernels of captured steps of few tokens too, whose
sum the next layer's norm computes. --kernels also prints each kernel's time without a graph. --tiles also tries
other tiles of the adapters, and B of down read by the weighted sum (folded) or before it (written). --shapes also tries
other tile shapes of plain experts.
"""

# T tokens · E experts · D hidden size · I intermediate size

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_driver import copy_bandwidth
from lorafleet.kernels.moe import expert_codes, moe_triton
from lorafleet.kernels.moe.expert_codes import ExpertCodes, ExpertMatrix
from lorafleet.kernels.moe.expert_lora import RECORD_FIELDS, StepExperts
from lorafleet.kernels.moe.few_tokens import FewTokenMixture, FewTokenRouter, few_token_mixture, serves_tokens
from lorafleet.kernels.moe.moe import ExpertMatrices, experts_mlp, route
from lorafleet.kernels.moe.routing_rule import RoutingRule
from lorafleet.kernels.quant.base_weight import Scheme
from lorafleet.kernels.quant.e2m1_scheme import MXFP4
from lorafleet.kernels.quant.int_weight import IntScheme
from lorafleet.kernels.quant.nf4 import NF4Scheme
from lorafleet.kernels.quant.scaled_weight import ScaledScheme

EXPERTS, PER_TOKEN, HIDDEN, INNER = 128, 8, 2048, 768
RULE = RoutingRule(PER_TOKEN, sums_to_one=True)
DTYPE = torch.bfloat16
TOKENS = (1, 8, 64, 256, 2048, 8192)
FLOPS = 800e12
ADAPTERS = 8
SCHEMES: dict[str, Scheme | None] = {
    "none": None,
    "nf4": NF4Scheme(),
    "int4": IntScheme(4, 128),
    "mxfp4": MXFP4,
    "fp8": ScaledScheme(block=128),
}
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
    def __init__(self, count: int, rank: int, scheme: Scheme | None) -> None:
        def random(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=DTYPE, device="cuda").normal_(std=0.02)

        def experts(outputs: int, inputs: int) -> ExpertMatrix:
            values_EOD = random(EXPERTS, outputs, inputs)
            return values_EOD if scheme is None else quantized(values_EOD, scheme)

        self.weights = [
            (random(EXPERTS, HIDDEN), ExpertMatrices(experts(2 * INNER, HIDDEN), experts(HIDDEN, INNER)))
            for _ in range(count)
        ]

        # Elements of one adapter in one layer: gate_up's A and B, then down's.
        self.elements = 0 if not rank else EXPERTS * rank * (HIDDEN + 2 * INNER + INNER + HIDDEN)
        self.adapters = [[self._blocks(random, rank) for _ in range(ADAPTERS if rank else 0)] for _ in range(count)]
        self.rank = rank
        self.side = torch.cuda.Stream()
        self.order_T = torch.empty(0, dtype=torch.int32, device="cuda")

    @staticmethod
    def _blocks(random: Callable[..., Tensor], rank: int) -> tuple[Tensor, Tensor]:
        """Returns two records, each followed by its matrices."""
        blocks = []
        for inputs, outputs in ((HIDDEN, 2 * INNER), (INNER, HIDDEN)):
            a, b = EXPERTS * rank * inputs, EXPERTS * outputs * rank
            offsets = [256, 256 + 2 * a, 256 + 2 * (a + b)]
            block = random(128 + a + b + 2 * EXPERTS)
            block[-2 * EXPERTS :].view(torch.float32).fill_(1.0)
            record = torch.tensor([*offsets, rank, 1, 0, 0, 0], dtype=torch.int64, device="cuda")
            block[: 4 * RECORD_FIELDS] = record.view(DTYPE)
            blocks.append(block)
        return blocks[0], blocks[1]

    def sort(self, slot_T: Tensor) -> None:
        """Sorts the tokens by slot for the runs that follow."""
        self.order_T = slot_T.argsort(stable=True).to(torch.int32)

    def run(self, x_TD: Tensor, slot_T: Tensor | None = None) -> Tensor:
        for (gate_ED, matrices), records in zip(self.weights, self.record_LKS, strict=True):
            routing = route(F.linear(x_TD, gate_ED), RULE)
            own = None
            if slot_T is not None:
                # The tokens' order costs nothing here, since a step's is computed on the host.
                to_gate_up, to_down = (
                    StepExperts(slot_T, self.order_T, (), record_S, self.rank, DTYPE, self.side) for record_S in records
                )
                own = to_gate_up, to_down
            out_TD = experts_mlp(x_TD, routing, matrices, own)
        return out_TD

    def run_few(self, x_TD: Tensor) -> None:
        for gate_ED, matrices in self.weights:
            few_token_mixture(x_TD, self.few_tokens(gate_ED, matrices))

    @staticmethod
    def few_tokens(gate_ED: Tensor, matrices: ExpertMatrices) -> FewTokenMixture:
        router = FewTokenRouter(gate_ED, RULE, None, None, early=True)
        return FewTokenMixture(router, matrices.gate_up_EUD, matrices.down_EDI, matrices.activation, None)

    def floor_ms(self, x_TD: Tensor, slot_T: Tensor | None, bandwidth: float) -> float:
        """Returns the floor of all layers together."""
        read = 0.0
        for gate_ED, matrices in self.weights:
            expert_TK = route(F.linear(x_TD, gate_ED), RULE).expert_TK
            chosen = len(expert_TK.unique())
            read += gate_ED.nbytes + chosen / EXPERTS * (nbytes(matrices.gate_up_EUD) + nbytes(matrices.down_EDI))
            if slot_T is not None:
                pairs = len((expert_TK + EXPERTS * slot_T.unsqueeze(1)).unique())
                read += pairs * self.elements * DTYPE.itemsize / EXPERTS
        flop = len(self.weights) * len(x_TD) * PER_TOKEN * 6 * HIDDEN * INNER
        return 1e3 * max(read / bandwidth, flop / FLOPS)

    @functools.cached_property
    def record_LKS(self) -> Tensor:
        addresses = [[[pair[k].data_ptr() for pair in layer] for k in range(2)] for layer in self.adapters]
        return torch.tensor(addresses, dtype=torch.int64, device="cuda")


def quantized(values_EOD: Tensor, scheme: Scheme) -> ExpertCodes:
    count, outputs, inputs = values_EOD.shape
    codes = ExpertCodes(scheme, (count, outputs, inputs), DTYPE, values_EOD.device)
    for expert, values_OD in enumerate(values_EOD):
        codes.weight.fill(expert * outputs, scheme.quantize(values_OD), (slice(0, outputs), slice(0, inputs)))
    return codes


def nbytes(matrix: ExpertMatrix) -> int:
    return sum(part.nbytes for part in matrix.parameters()) if isinstance(matrix, ExpertCodes) else matrix.nbytes


def graph_ms(run: Callable[[], object], repeats: int) -> float:
    """Returns the median time of the replays of a captured graph."""
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


def other_tiles(num_tokens: int) -> Iterator[str]:
    """Sets other tiles of the adapters and yields their names, then sets the served ones again."""
    shapes, most_folded = moe_triton._SHAPES, moe_triton.MOST_FOLDED_PAIRS
    served = moe_triton._shape_for(num_tokens * PER_TOKEN, EXPERTS, False).adapter_pairs
    folds = num_tokens * PER_TOKEN <= most_folded
    for pairs, folded in product((16, 32, 64), (True, False)):
        if (pairs != served and folded != folds) or (pairs, folded) == (served, folds) or (folded and num_tokens > 512):
            continue
        moe_triton._SHAPES = tuple((most, replace(shape, adapter_pairs=pairs)) for most, shape in shapes)
        moe_triton.MOST_FOLDED_PAIRS = 1 << 30 if folded else 0
        yield f"tiles of {pairs} pairs, {'folded' if folded else 'written'}"
    moe_triton._SHAPES, moe_triton.MOST_FOLDED_PAIRS = shapes, most_folded


def print_kernels(run: Callable[[], object], num_layers: int) -> None:
    """Prints the microseconds a layer of each kernel, launched without a graph."""
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    for event in sorted(profile.key_averages(), key=lambda event: -event.device_time_total):
        print(f"        {event.device_time_total / num_layers:8.1f} us, {event.count:3} x {event.key[:60]}", flush=True)


def measure(layers: Layers, bandwidth: float, arguments: argparse.Namespace) -> None:
    own = moe_triton._SHAPES
    torch.manual_seed(0)
    for num_tokens in arguments.tokens:
        x_TD = torch.randn(num_tokens, HIDDEN, dtype=DTYPE, device="cuda")
        moe_triton._SHAPES = own
        turns = torch.arange(num_tokens, device="cuda", dtype=torch.int32)
        own_T = turns % ADAPTERS if num_tokens <= 256 else turns * ADAPTERS // num_tokens
        nobody_T = torch.full_like(own_T, -1)
        base = 0.0
        kinds = [("base", None), ("all base, launched with", nobody_T), ("8 adapters", own_T)]
        for name, slot_T in kinds if layers.rank else kinds[:1]:
            if slot_T is not None:
                layers.sort(slot_T)
            floor = layers.floor_ms(x_TD, slot_T, bandwidth) / arguments.layers
            found = graph_ms(lambda x=x_TD, slots=slot_T: layers.run(x, slots), 12) / arguments.layers
            base = base or found
            ms = f"{found:7.3f} ms per layer, {found / base:.2f} x base, floor {floor:7.3f}, {found / floor:.2f} x"
            print(f"{num_tokens:5} tokens, {name}: {ms}", flush=True)
            if arguments.kernels:
                print_kernels(lambda x=x_TD, slots=slot_T: layers.run(x, slots), arguments.layers)
        if arguments.few_tokens and serves_tokens(layers.few_tokens(*layers.weights[0]), num_tokens):
            found = graph_ms(lambda x=x_TD: layers.run_few(x), 12) / arguments.layers
            print(f"{num_tokens:5} tokens, kernels for few tokens: {found:7.3f} ms per layer", flush=True)
            if arguments.kernels:
                print_kernels(lambda x=x_TD: layers.run_few(x), arguments.layers)
        for name in other_tiles(num_tokens) if arguments.tiles else ():
            found = graph_ms(lambda x=x_TD, slots=own_T: layers.run(x, slots), 12) / arguments.layers
            print(f"{num_tokens:5} tokens, 8 adapters, {name}: {found:7.3f} ms per layer", flush=True)
        tried: list[tuple[float, moe_triton._Shape]] = []
        for values in TRIED[num_tokens] if arguments.shapes else ():
            shape = moe_triton._Shape(values[0], moe_triton._Gemm(*values[1:]))
            moe_triton._SHAPES = ((float("inf"), shape),)
            try:
                tried.append((graph_ms(lambda x=x_TD: layers.run(x), 7) / arguments.layers, shape))
            except Exception as error:  # There is not enough shared memory for so many stages.
                torch.cuda.synchronize()
                print("      ", values, type(error).__name__, flush=True)
        for ms, shape in sorted(tried, key=lambda result: result[0])[:4]:
            print(f"      {ms:7.3f} {shape}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--shapes", action="store_true")
    parser.add_argument("--quantization", nargs="+", choices=list(SCHEMES), default=["none"])
    parser.add_argument("--triton", action="store_true")
    parser.add_argument("--few-tokens", action="store_true")
    arguments = parser.parse_args()
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, copies {bandwidth / 1e12:.2f} TB/s, {arguments.layers} layers", flush=True)
    if arguments.triton:
        expert_codes.tiled_weight = lambda *_arguments: None
    for quantization in arguments.quantization:
        print(f"{quantization}{', by Triton' if arguments.triton else ''}:", flush=True)
        measure(Layers(arguments.layers, arguments.rank, SCHEMES[quantization]), bandwidth, arguments)


if __name__ == "__main__":
    main()
