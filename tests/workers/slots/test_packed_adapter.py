"""Packing, on a linear of two slices and one of a single slice."""

# R rank · D in features · O out features

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.lora.packed_lora import LinearPlace, LoRATables, PackedLoRA
from lorafleet.kernels.quant.fp8 import FP8
from lorafleet.workers.adapters.content_digest import ContentDigest
from lorafleet.workers.slots.base_parts import BasePart, BaseParts
from lorafleet.workers.slots.layer_weights import LoRALayerWeights
from lorafleet.workers.slots.lora_model import LoRAModel
from lorafleet.workers.slots.packed_adapter import PackedAdapter, pack, slot_bytes

NAMES = (("layers.0.gate", "layers.0.up"), ("layers.0.down",))
DTYPES = [torch.float32, torch.bfloat16, FP8]
SHAPES = [(12, (10, 6)), (10, (12,))]
BASE = BaseParts(
    [
        BasePart(names, LinearPlace(0, tuple((slice(0, out),) for out in outs)))
        for names, (_, outs) in zip(NAMES, SHAPES, strict=True)
    ]
)


def layer(in_features: int, out_features: int, rank: int, dtype: torch.dtype) -> LoRALayerWeights:
    row_scale_R = torch.rand(rank) if dtype == FP8 else None
    a_RD, b_OR = torch.randn(rank, in_features).to(dtype), torch.randn(out_features, rank).to(dtype)
    return LoRALayerWeights(a_RD, b_OR, rank / 4, row_scale_R)


def packed(modules: dict[str, LoRALayerWeights], dtype: torch.dtype) -> PackedAdapter:
    model = LoRAModel("a", ContentDigest.known("d"), modules, num_bytes=1234)
    return pack(model, BASE, dtype, lambda size: torch.zeros(size, dtype=torch.uint8))


def same(found: Tensor, *parts: Tensor) -> bool:
    """torch compares no float8 on a CPU."""
    return torch.equal(found.double(), torch.cat([part.double() for part in parts]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_matrix_is_found_again_bit_by_bit(dtype: torch.dtype) -> None:
    gate, up, down = layer(12, 10, 3, dtype), layer(12, 6, 5, dtype), layer(10, 12, 7, dtype)
    adapter = packed({"layers.0.gate": gate, "layers.0.up": up, "layers.0.down": down}, dtype)
    first, second = (adapter.weights(i, *shape) for i, shape in enumerate(SHAPES))
    assert first is not None and second is not None
    assert same(first.a_RD, gate.a_RD, up.a_RD)
    assert all(b is not None and same(b, s.b_OR) for b, s in zip(first.b, (gate, up), strict=True))
    assert first.scales == (0.75, 1.25)
    assert same(second.a_RD, down.a_RD)
    assert adapter.info.rank == 7 and adapter.info.num_bytes == 1234
    assert adapter.info.target_modules == ["down", "gate", "up"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matrices_of_any_strides_are_packed(dtype: torch.dtype) -> None:
    """A column of a matrix, [R, 1] or [O, 1], is contiguous to torch and keeps its stride."""
    plain = layer(12, 6, 1, dtype)
    a_RD, b_OR = torch.zeros(12, 5).to(dtype).T[:1], torch.zeros(1, 6).to(dtype).T
    a_RD.copy_(plain.a_RD), b_OR.copy_(plain.b_OR)
    assert b_OR.contiguous().stride(1) == 6
    odd = LoRALayerWeights(a_RD, b_OR, plain.scaling, plain.row_scale_R)
    for weights in (plain, odd):
        first = packed({"layers.0.up": weights}, dtype).weights(0, *SHAPES[0])
        assert first is not None and first.b[1] is not None
        assert same(first.a_RD, plain.a_RD) and same(first.b[1], plain.b_OR)


def test_scales_lie_behind_an_fp8_a_where_the_kernels_look_for_them() -> None:
    gate, up, down = layer(12, 10, 3, FP8), layer(12, 6, 5, FP8), layer(10, 12, 7, FP8)
    adapter = packed({"layers.0.gate": gate, "layers.0.up": up, "layers.0.down": down}, FP8)
    first, second = (adapter.weights(i, *shape) for i, shape in enumerate(SHAPES))
    assert first is not None and first.row_scale_R is not None and gate.row_scale_R is not None
    assert up.row_scale_R is not None
    assert torch.equal(first.row_scale_R, torch.cat([gate.row_scale_R, up.row_scale_R]))
    assert first.row_scale_R.data_ptr() == first.a_RD.data_ptr() + 8 * 12
    assert second is not None and second.row_scale_R is not None and down.row_scale_R is not None
    assert torch.equal(second.row_scale_R, down.row_scale_R)
    assert second.row_scale_R.data_ptr() == second.a_RD.data_ptr() + 80, "7 rows of 10 bytes, rounded up"


def test_what_an_adapter_leaves_alone_has_no_matrices() -> None:
    up = layer(12, 6, 5, torch.float32)
    adapter = packed({"layers.0.up": up}, torch.float32)
    first = adapter.weights(0, *SHAPES[0])
    assert first is not None and first.b[0] is None and first.ranks == (0, 5)
    assert torch.equal(first.a_RD, up.a_RD)
    assert adapter.weights(1, *SHAPES[1]) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matrices_begin_where_kernels_may_load_16_bytes_and_fit_the_slot(dtype: torch.dtype) -> None:
    modules = {
        name: layer(i, o, 5, dtype)
        for name, (i, o) in zip((n for names in NAMES for n in names), ((12, 10), (12, 6), (10, 12)), strict=True)
    }
    adapter = packed(modules, dtype)
    offsets = adapter.table.offset_LA[adapter.table.offset_LA >= 0]
    assert len(offsets) == 5 and not (offsets % 256).any()
    tables = LoRATables(len(SHAPES), 1, torch.device("cpu"))
    linears = [PackedLoRA(i, *shape, tables) for i, shape in enumerate(SHAPES)]
    assert adapter.block.numel() == slot_bytes(linears, 5, dtype)
