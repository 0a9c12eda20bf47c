"""Random adapters and batch mixes for the LoRA kernels' tests, and the plain loop that they are compared with."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from lorafleet.kernels.lora.lora_batch import BASE_SLOT, LoRABatch, prompt_tile_tokens
from lorafleet.kernels.lora.packed_lora import AdapterTable, LoRATables, PackedLoRA, SlotWeights, with_scales_behind
from lorafleet.kernels.quant.fp8 import FP8, FP8_MAX

FP8_STD = 100.0  # of random e4m3 numbers; the largest is 448
MIXES = ("one", "all_different", "zipf", "some_base", "mostly_base")
# One tuple an adapter, one rank a slice; 0: the adapter leaves that slice alone, None: the whole linear.
RANKS_OF_SLOTS: tuple[tuple[int, int, int] | None, ...] = (
    (16, 16, 16), (1, 1, 1), (8, 0, 3), (0, 5, 0), None, (64, 64, 64), (7, 33, 0), (0, 0, 24),
)  # fmt: skip


def slots_of_tokens(mix: str, num_tokens: int, num_slots: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    if mix == "one":
        return [num_slots - 1] * num_tokens
    if mix == "all_different":
        return [t % num_slots for t in range(num_tokens)]
    zipf = rng.choices(range(num_slots), weights=[1 / (i + 1) for i in range(num_slots)], k=num_tokens)
    base_share = {"zipf": 0.0, "some_base": 0.3, "mostly_base": 0.9}[mix]
    slots = [BASE_SLOT if rng.random() < base_share else slot for slot in zipf]
    slots[-1] = 0  # never a batch of base tokens alone: that one launches nothing
    return slots


def make_packed(
    in_features: int,
    out_features: tuple[int, ...],
    ranks_of_slots: Sequence[tuple[int, ...] | None] = RANKS_OF_SLOTS,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> PackedLoRA:
    """One packed linear (the second of two in its tables) whose slots hold adapters of these ranks."""
    tables = LoRATables(2, len(ranks_of_slots), torch.device(device))
    packed = PackedLoRA(1, in_features, out_features, tables)
    generator = torch.Generator(device).manual_seed(len(ranks_of_slots))
    for slot, all_ranks in enumerate(ranks_of_slots):
        weights = None
        ranks = () if all_ranks is None else all_ranks[: len(out_features)]
        if sum(ranks):
            a_RD = _normal((sum(ranks), in_features), in_features**-0.5, dtype, generator)
            b = tuple(
                _normal((out, rank), rank**-0.5, dtype, generator) if rank else None
                for out, rank in zip(out_features, ranks, strict=True)
            )
            row_scale_R = None
            if dtype == FP8:
                a_RD, row_scale_R = with_scales_behind(a_RD, _row_scales(ranks, in_features, generator))
            scales = tuple(0.5 + 0.25 * i + slot / 8 for i in range(len(ranks)))
            weights = SlotWeights(a_RD, b, scales, row_scale_R)
        packed.set_slot(slot, weights)
        tables.write_slot(slot, AdapterTable.of([None, weights]))
    return packed


def make_inputs(
    packed: PackedLoRA, num_tokens: int, seed: int = 0, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """x and a base output y, of the adapters' device, and of their dtype where none is given."""
    a_RD = next(w.a_RD for w in packed.slots if w is not None)
    dtype = dtype or a_RD.dtype
    generator = torch.Generator(a_RD.device).manual_seed(seed)
    x_TD = _normal((num_tokens, packed.in_features), 1.0, dtype, generator)
    return x_TD, _normal((num_tokens, sum(packed.out_features)), 1.0, dtype, generator)


def _normal(shape: tuple[int, ...], std: float, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """FP8 numbers have a scale beside them, and so the same spread whatever std."""
    x = torch.randn(shape, generator=generator, device=generator.device)
    if dtype == FP8:
        return (x * FP8_STD).clamp(-FP8_MAX, FP8_MAX).to(FP8)  # a number beyond the largest becomes NaN
    return (x * std).to(dtype)


def _row_scales(ranks: tuple[int, ...], in_features: int, generator: torch.Generator) -> Tensor:
    """Each row another one, so that the adapters' sums are as large as those of other dtypes."""
    of_rank = torch.cat([torch.full((rank,), max(rank, 1) ** -0.5) for rank in ranks]).to(generator.device)
    uneven = torch.rand(of_rank.shape, generator=generator, device=generator.device) + 0.5
    return of_rank * uneven * in_features**-0.5 / FP8_STD**2


def reference(x_TD: Tensor, y_TO: Tensor, packed: PackedLoRA, slot_of_token: Sequence[int]) -> Tensor:
    """A loop over tokens in float64; shares no code with the kernels."""
    y_TO = y_TO.to(torch.float64, copy=True)
    for t, slot in enumerate(slot_of_token):
        weights = packed.slots[slot] if slot != BASE_SLOT else None
        if weights is None:
            continue
        a_RD = weights.a_RD.double()
        if weights.row_scale_R is not None:
            a_RD *= weights.row_scale_R.double().unsqueeze(1)
        column, row = 0, 0
        for p, out in enumerate(packed.out_features):
            if (b := weights.b[p]) is not None:
                a = a_RD[row : row + b.shape[1]]
                y_TO[t, column : column + out] += weights.scales[p] * (b.double() @ (a @ x_TD[t].double()))
                row += b.shape[1]
            column += out
    return y_TO


def build(slot_of_token: Sequence[int], packed: PackedLoRA) -> LoRABatch:
    """Of prompts, with the look-up that a GPU's step begins with."""
    batch = LoRABatch.build(slot_of_token, packed.tables, tile_tokens=prompt_tile_tokens(len(slot_of_token)))
    assert batch is not None
    batch.addresses.look_up()
    return batch
