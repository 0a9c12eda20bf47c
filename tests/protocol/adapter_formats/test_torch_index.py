"""What torch.save writes of a dict of tensors is read as torch.load reads it, without torch.load."""

from __future__ import annotations

import hashlib
import pickle
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from lorafleet.protocol.adapter_formats.adapter_files import BIN_NAME, AdapterFolder
from lorafleet.protocol.adapter_formats.torch_index import MAX_STEPS, read_index
from lorafleet.protocol.errors import AdapterMalformed, AdapterUnsupported
from lorafleet.workers.adapters.weight_files import read_weights

WHOLE = torch.arange(24, dtype=torch.float32).view(4, 6)
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8]


def read(folder: Path, value: object, **options: object) -> dict[str, torch.Tensor]:
    torch.save(value, folder / BIN_NAME, **options)  # type: ignore[arg-type]
    with AdapterFolder.at(folder).open(BIN_NAME, 1 << 20) as file:
        weights = read_weights(file, hashlib.sha256())
        loaded = weights.load().by_name
    assert {name: info.shape for name, info in weights.infos.items()} == {n: tuple(t.shape) for n, t in loaded.items()}
    return dict(loaded)


@pytest.mark.parametrize(
    "tensors",
    [
        {str(dtype): WHOLE.to(dtype) for dtype in DTYPES},
        {"transposed": WHOLE.T, "row": WHOLE[2], "part": WHOLE[1:3, 2:5], "every other": WHOLE[:, ::2], "all": WHOLE},
        {"number": torch.tensor(3.0), "none": torch.empty(0, 4), "repeated": torch.ones(1).expand(1)},
        OrderedDict(parameter=torch.nn.Parameter(WHOLE.clone()), plain=WHOLE),
        torch.nn.Linear(3, 2).state_dict(),
        {},
    ],
    ids=["dtypes", "views", "small", "parameters", "state dict", "empty"],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_tensors_are_what_torch_load_gives(tmp_path: Path, tensors: dict[str, torch.Tensor], protocol: int) -> None:
    found = read(tmp_path, tensors, pickle_protocol=protocol)
    expected = torch.load(tmp_path / BIN_NAME, weights_only=False)
    assert list(found) == list(expected)
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name])
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize


def test_a_large_record_is_not_copied_for_each_of_its_views(tmp_path: Path) -> None:
    whole = torch.zeros(1 << 16)
    found = read(tmp_path, {f"v{i}": whole[i : i + 2] for i in range(100)})
    assert all(tensor.untyped_storage().nbytes() == 8 for tensor in found.values())


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.ones(2, dtype=torch.complex64), "ComplexFloatStorage"),
        (torch.ones(2).to(torch.float8_e4m3fn), "UntypedStorage"),
        (torch.ones(2, device="meta"), "_rebuild_meta_tensor"),
        ({1, 2}, "more than tensors"),
        (torch.nn.Linear(1, 1), "more than tensors"),
    ],
    ids=str,
)
def test_what_is_no_dense_tensor_is_refused_by_name(tmp_path: Path, value: object, words: str) -> None:
    with pytest.raises((AdapterUnsupported, AdapterMalformed), match=words):
        read(tmp_path, {"a": value})


@pytest.mark.parametrize("cut", range(0, 60, 7))
def test_a_damaged_index_is_one(cut: int) -> None:
    data = pickle.dumps({"a": 1, "b": [2, (3,)]}, 2)
    with pytest.raises((AdapterUnsupported, AdapterMalformed)):
        read_index(data[: cut % len(data)], "x")


def test_a_long_index_is_given_up() -> None:
    with pytest.raises(AdapterMalformed, match=f"more than {MAX_STEPS} steps"):
        read_index(b"\x80\x02" + b"N" * (MAX_STEPS + 10) + b".", "x")
