"""A decoder's packed linears with random weights and adapters, each followed by the kernel that reads its output.

The tuners of kernels/lora and kernels/linear, and benchmarks/lora_kernels.py, measure it. It has the shapes of an 8B
Llama, without attention.
"""

# T tokens · D in · O out

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lorafleet.kernels.decoder.gated_mul import gated_mul
from lorafleet.kernels.decoder.rms_norm import NormWeight, add_rms_norm
from lorafleet.kernels.decoder.rope_store import rotate_and_store
from lorafleet.kernels.decoder.scratch import Scratch
from lorafleet.kernels.linear.linear_tuning import LinearShape
from lorafleet.kernels.linear.split_linear import gated_linear, split_linear
from lorafleet.kernels.lora.apply_lora import linear_with_lora
from lorafleet.kernels.lora.linear_output import LinearOutput
from lorafleet.kernels.lora.lora_batch import TILE_TOKENS, LoRABatch, count_tiles, static_tile_counts
from lorafleet.kernels.lora.packed_lora import AdapterTable, LoRATables, PackedLoRA, SlotWeights, with_scales_behind
from lorafleet.kernels.lora.sm_split import SMSplit, split_for
from lorafleet.kernels.quant.base_gemms import gemms_of
from lorafleet.kernels.quant.base_weight import BaseWeight, PlainWeight, Scheme
from lorafleet.kernels.quant.fp8 import FP8
from lorafleet.kernels.quant.tiled_weight import empty_weight

LINEARS = {
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate_up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}
MAX_SLOTS = 64
DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
FP8_STD = 100.0  # standard deviation of random e4m3 numbers; the largest is 448
Linear = Callable[[Tensor, BaseWeight, PackedLoRA], LinearOutput]


class Stack:
    """Random weights and adapters of `num_layers` layers. Zeros would run faster than real data.

    Every layer has its own weights, so that with enough layers none is in the cache. A and B have lora_dtype. Without a
    scheme, the base's weights are plain.
    """

    def __init__(self, num_layers: int, lora_dtype: torch.dtype = DTYPE, scheme: Scheme | None = None) -> None:
        scratch = Scratch(DTYPE, DEVICE)
        self.num_layers = num_layers
        self.lora_dtype = lora_dtype
        self.tables = LoRATables(num_layers * len(LINEARS), MAX_SLOTS, DEVICE)
        self.weights: list[BaseWeight] = []
        self.packed: list[PackedLoRA] = []
        for _, (size, outs) in itertools.product(range(num_layers), LINEARS.values()):
            self.packed.append(PackedLoRA(len(self.packed), size, outs, self.tables))
            self.weights.append(_random_weight(sum(outs), size, scheme, scratch))
        self.gemms = gemms_of(self.weights)
        self._ranks: list[int] = []

    def load(self, rank_of_slot: list[int]) -> None:
        if rank_of_slot == self._ranks:
            return
        self._ranks = rank_of_slot
        for slot, rank in enumerate(rank_of_slot):
            slot_weights: list[SlotWeights | None] = []
            for packed in self.packed:
                weights = _random_slot(packed, rank, self.lora_dtype)
                packed.set_slot(slot, weights)
                slot_weights.append(weights)
            self.tables.write_slot(slot, AdapterTable.of(slot_weights))

    def inputs(self, num_tokens: int) -> dict[int, Tensor]:
        return {size: _random(num_tokens, size, std=1.0) for size, _ in LINEARS.values()}

    def base(self, x_of_size: dict[int, Tensor]) -> None:
        self._run(x_of_size, lambda x, w, _: LinearOutput(w.linear(x, None)))

    def in_shapes(self, x_of_size: dict[int, Tensor], shapes: Mapping[str, LinearShape | None]) -> None:
        """Runs the base's linears, each in the shape for its name in LINEARS. None selects cuBLAS."""
        readers = itertools.cycle(_Readers(x_of_size[4096].shape[0]).in_order())
        names = itertools.cycle(LINEARS)
        for name, weight, packed, reader in zip(names, self.weights, self.packed, readers, strict=False):
            x_TD, shape = x_of_size[packed.in_features], shapes[name]
            if shape is None:
                reader(LinearOutput(weight.linear(x_TD, None)))
            elif shape.gated:
                gated_linear(x_TD, weight.dequantized(), shape)
            else:
                reader(split_linear(x_TD, weight.dequantized(), None, shape))

    def with_lora(self, x_of_size: dict[int, Tensor], batch: LoRABatch) -> None:
        batch.begin()
        self._run(x_of_size, lambda x, w, packed: linear_with_lora(x, w, None, packed, batch))

    def _run(self, x_of_size: dict[int, Tensor], linear: Linear) -> None:
        readers = itertools.cycle(_Readers(x_of_size[4096].shape[0]).in_order())
        for weight, packed, reader in zip(self.weights, self.packed, readers, strict=False):
            reader(linear(x_of_size[packed.in_features], weight, packed))


class _Readers:
    """The kernels that read each linear's output and add the adapters' part in the same pass."""

    def __init__(self, num_tokens: int) -> None:
        self.cos, self.sin = (_random(num_tokens, 1, 64, std=1.0) for _ in range(2))
        self.k, self.v = (_random(num_tokens // 16 + 1, 16, 8, 128, std=1.0) for _ in range(2))
        self.slots = torch.arange(num_tokens, device=DEVICE)
        self.residual = _random(num_tokens, 4096, std=1.0)
        self.weight = _random(4096, std=0.01)

    def in_order(self) -> list[Callable[[LinearOutput], Tensor]]:
        """Returns the readers in the order of LINEARS."""
        return [self._rotate, self._norm, gated_mul, self._norm]

    def _rotate(self, out: LinearOutput) -> Tensor:
        return rotate_and_store(out, self.cos, self.sin, None, None, self.k, self.v, self.slots, 1e-5)

    def _norm(self, out: LinearOutput) -> Tensor:
        return add_rms_norm(out, self.residual, NormWeight(self.weight), 1e-5)


def _random_weight(outputs: int, inputs: int, scheme: Scheme | None, scratch: Scratch) -> BaseWeight:
    values_OD = _random(outputs, inputs, std=inputs**-0.5)
    if scheme is None:
        return PlainWeight(values_OD)
    weight = empty_weight(scheme, outputs, inputs, DTYPE, DEVICE, scratch)
    weight.fill(0, scheme.quantize(values_OD), (slice(0, outputs), slice(0, inputs)))
    return weight


def _random_slot(packed: PackedLoRA, rank: int, dtype: torch.dtype) -> SlotWeights:
    a_std, b_std = (FP8_STD, FP8_STD) if dtype == FP8 else (packed.in_features**-0.5, rank**-0.5)
    largest = torch.finfo(dtype).max  # larger numbers become NaN in e4m3
    b = tuple(_random(out, rank, std=b_std).clamp(-largest, largest).to(dtype) for out in packed.out_features)
    a_RD = _random(rank * len(b), packed.in_features, std=a_std).clamp(-largest, largest).to(dtype)
    row_scale_R = None
    if dtype == FP8:
        scale = (packed.in_features * rank) ** -0.5 / FP8_STD**2
        a_RD, row_scale_R = with_scales_behind(a_RD, torch.full((len(a_RD),), scale, device=DEVICE))
    return SlotWeights(a_RD, b, (1.0,) * len(b), row_scale_R)


def _random(*shape: int, std: float) -> Tensor:
    return torch.empty(*shape, dtype=DTYPE, device=DEVICE).normal_(0, std)


def captured(work: Callable[[], None], priority: int = 0) -> torch.cuda.CUDAGraph:
    """Captures the work on a stream of that priority, after it has run once."""
    stream = torch.cuda.Stream(priority=priority)
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph


def medians(graphs: dict[str, torch.cuda.CUDAGraph], repeats: int) -> dict[str, float]:
    """Returns the median milliseconds of each graph. The graphs alternate, so that a slower clock slows all of them."""
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


def smallest_batch(
    slot_of_token: Sequence[int], rank_of_slot: Sequence[int], tables: LoRATables, tile_tokens: int = TILE_TOKENS
) -> LoRABatch:
    """Returns the static batch that the engine would have for the step: with the fewest tiles that suffice, and with
    the split of the GPU that was measured for a decode step."""
    num_tokens = len(slot_of_token)
    needed = count_tiles(slot_of_token, num_tokens, tile_tokens)
    tiles = min(count for count in static_tile_counts(num_tokens, MAX_SLOTS, tile_tokens) if count >= needed)
    batch = LoRABatch.static(num_tokens, tiles, max(rank_of_slot), tables, tile_tokens)
    if not batch.is_prefill:
        run_beside(batch, split_for(DEVICE, num_tokens, tiles, max(rank_of_slot)))
    batch.fill(slot_of_token, rank_of_slot)
    return batch


def run_beside(batch: LoRABatch, split: SMSplit) -> None:
    batch.run_beside(split, torch.cuda.Stream(priority=split.lora_priority))
