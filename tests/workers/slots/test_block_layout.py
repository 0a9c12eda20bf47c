"""Adapters that are read right into the block that their slots are filled from: block_layout.py."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lorafleet.kernels.lora.packed_lora import LinearPlace
from lorafleet.protocol.errors import AdapterChanged, AdapterMalformed
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.workers.adapters.parallel_reading import MIN_THREADS_FOR_PIECES, ParallelReader
from lorafleet.workers.slots import packed_adapter
from lorafleet.workers.slots.base_parts import BasePart, BaseParts
from lorafleet.workers.slots.block_layout import read_targets
from lorafleet.workers.slots.lora_model import LoRAModel
from lorafleet.workers.slots.packed_adapter import PackedAdapter, pack
from tests.workers.conftest import AdapterDir, MakeAdapter, base_of, make_base

PIECE_BYTES = 256
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PACKED = [("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",)]
PACKED += [("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)]


@pytest.fixture(params=[1, MIN_THREADS_FOR_PIECES], ids=["one thread", "pieces are hashed"])
def reader(request: pytest.FixtureRequest) -> Iterator[ParallelReader]:
    made = ParallelReader(request.param, PIECE_BYTES)
    yield made
    made.stop()


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an entry for each part of an adapter that pack() copies."""
    parts: list[int] = []
    fill = packed_adapter._fill

    def count_and_fill(*args: Any) -> None:
        parts.append(1)
        fill(*args)

    monkeypatch.setattr(packed_adapter, "_fill", count_and_fill)
    return parts


def base_parts() -> BaseParts:
    outputs = {name: out for name, (_, out) in base_of(make_base("llama")).layout.linears.items()}
    layers = sorted({name.split(".")[1] for name in outputs})
    packed = [tuple(f"layers.{layer}.{name}" for name in names) for layer in layers for names in PACKED]
    return BaseParts(
        [BasePart(names, LinearPlace(0, tuple((slice(0, outputs[n]),) for n in names))) for names in packed]
    )


def load(
    adapter: AdapterDir, reader: ParallelReader | None, dtype: torch.dtype = torch.float32, digest: str = ""
) -> PackedAdapter:
    """With a reader, the adapter is read in place if it can be."""

    def dirty(size: int) -> Tensor:
        return torch.full((size,), 0xFF, dtype=torch.uint8)  # NaN as numbers

    parts = base_parts()
    model = LoRAModel.from_local_checkpoint(
        adapter.path,
        base=base_of(make_base("llama")),
        config=LoRAConfig(),
        dtype=dtype,
        name="sql",
        expected_digest=digest,
        reader=reader,
        place=None if reader is None else partial(read_targets, base=parts, dtype=dtype, allocate=dirty),
    )
    return pack(model, parts, dtype, lambda size: torch.zeros(size, dtype=torch.uint8))


def check_same(one: PackedAdapter, other: PackedAdapter) -> None:
    assert one.info == other.info
    assert torch.equal(one.block, other.block)
    for field in ("offset_LA", "rank_LP", "scale_LP"):
        assert (getattr(one.table, field) == getattr(other.table, field)).all()
    assert (one.extra is None) == (other.extra is None)
    if one.extra is not None and other.extra is not None:
        assert torch.equal(one.extra.block, other.extra.block)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"target_modules": ["k_proj", "up_proj"]},
        {"rank_pattern": {"k_proj": 3, "layers.0.self_attn.o_proj": 7}, "alpha_pattern": {"v_proj": 5}},
        {"use_rslora": True},
        {"use_dora": True},
        {"modules_to_save": ["input_layernorm"]},
    ],
    ids=str,
)
def test_a_plain_adapter_is_not_copied(
    make_adapter: MakeAdapter, reader: ParallelReader, copied: list[int], fields: dict[str, Any]
) -> None:
    adapter = make_adapter(**{"target_modules": LINEARS, **fields})
    in_place = load(adapter, reader)
    assert not copied
    check_same(in_place, load(adapter, None))
    assert copied
    check_same(load(adapter, reader, digest=in_place.info.digest), in_place)  # a content that is known by now


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16], ids=str)
def test_values_that_are_cast_are_copied(
    make_adapter: MakeAdapter, reader: ParallelReader, copied: list[int], stored: torch.dtype
) -> None:
    adapter = make_adapter(target_modules=LINEARS).map(lambda name, tensor: (name, tensor.to(stored)))
    cast = load(adapter, reader)
    assert copied
    check_same(cast, load(adapter, None))
    copied.clear()
    check_same(load(adapter, reader, stored), load(adapter, None, stored))


def test_computed_values_are_copied(make_adapter: MakeAdapter, reader: ParallelReader, copied: list[int]) -> None:
    adapter = make_adapter(target_modules=LINEARS, init_lora_weights="pissa")
    computed = load(adapter, reader)
    assert copied
    check_same(computed, load(adapter, None))


def test_another_content_is_refused(make_adapter: MakeAdapter, reader: ParallelReader) -> None:
    adapter = make_adapter(target_modules=LINEARS)
    digest = load(adapter, reader).info.digest
    adapter.map(lambda name, tensor: (name, tensor + 1))
    with pytest.raises(AdapterChanged, match="the files have the digest"):
        load(adapter, reader, digest=digest)


def test_a_value_that_is_not_finite_is_named(make_adapter: MakeAdapter, reader: ParallelReader) -> None:
    adapter = make_adapter(target_modules=LINEARS)
    bad = next(name for name in adapter.tensors if "o_proj.lora_B" in name)
    adapter.map(lambda name, tensor: (name, tensor / 0 if name == bad else tensor))
    with pytest.raises(AdapterMalformed, match=f"{bad}.* has NaN or infinite values"):
        load(adapter, reader)


def test_the_kernel_may_return_any_number_of_bytes(
    make_adapter: MakeAdapter, reader: ParallelReader, copied: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = make_adapter(target_modules=LINEARS)
    whole = load(adapter, reader)
    preadv = os.preadv

    def some(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        count = max(1, sum(map(len, buffers)) * 2 // 3)
        parts = []
        for buffer in buffers:
            parts.append(buffer[:count])
            count -= len(parts[-1])
        return preadv(fd, [part for part in parts if len(part)], offset)

    monkeypatch.setattr(os, "preadv", some)
    check_same(load(adapter, reader), whole)
    assert not copied
