"""Lists of tensors that come later: their places in the file, and how far it is complete."""

from __future__ import annotations

import random

import pytest
import torch
from safetensors.torch import save

from lorafleet.protocol.adapter_formats.announced_tensors import TensorPlace, complete_until, read_announced
from lorafleet.protocol.adapter_formats.safetensors_header import MAX_TENSORS
from lorafleet.protocol.errors import AdapterMalformed

TENSORS = {
    "b": torch.arange(6.0).view(2, 3),
    "a": torch.ones(5, dtype=torch.bfloat16),
    "c": torch.zeros(0, 4),
    "d": torch.arange(3, dtype=torch.uint8),
    "e": torch.tensor(7, dtype=torch.int64),
}


def entry(name: str) -> dict[str, object]:
    tensor = TENSORS[name]
    return {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


@pytest.mark.parametrize("seed", range(5))
def test_tensors_in_any_order_fill_the_file_that_safetensors_writes(seed: int) -> None:
    names = random.Random(seed).sample(list(TENSORS), len(TENSORS))
    announced = read_announced([entry(name) for name in names])
    expected = save(TENSORS)
    assert announced.num_bytes == len(expected)
    file = bytearray(b"?" * len(expected))
    file[: len(announced.header)] = announced.header
    complete = complete_until(announced.tensors, announced.num_bytes)
    for name, place, until in zip(names, announced.tensors, complete, strict=True):
        values = TENSORS[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        assert len(values) == place.num_bytes
        file[place.start : place.start + place.num_bytes] = values
        assert file[:until] == expected[:until]
    assert complete[-1] == len(expected) and file == expected


def test_a_file_is_complete_up_to_the_first_missing_tensor() -> None:
    places = [TensorPlace("uint8", (2,), start, 2) for start in (12, 8, 14, 10)]
    assert complete_until(places, 16) == [8, 10, 10, 16]


@pytest.mark.parametrize(
    ("entries", "fault"),
    [
        ("tensors", "must be a list"),
        ([], "must be a list"),
        ([entry("a")] * (MAX_TENSORS + 1), "must be a list"),
        ([entry("a") | {"offset": 0}], "nothing else"),
        ([entry("a") | {"shape": [1] * 9}], "wrongly"),
        ([entry("a") | {"shape": [True]}], "wrongly"),
        ([entry("a") | {"shape": [1.0]}], "wrongly"),
        ([entry("a") | {"name": ""}], "wrongly"),
        ([entry("a") | {"name": "\ud800"}], "wrongly"),
        ([entry("a") | {"name": "__metadata__"}], "wrongly"),
        ([entry("a") | {"dtype": "complex64"}], "dtype"),
    ],
)
def test_a_wrong_list_is_refused_by_what_is_wrong(entries: object, fault: str) -> None:
    with pytest.raises(AdapterMalformed, match=fault):
        read_announced(entries)
