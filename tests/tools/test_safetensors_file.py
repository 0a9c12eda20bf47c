"""Files that the library reads, written one tensor at a time."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open

from lorafleet.protocol.errors import ConfigError
from lorafleet.tools.new_folder import new_folder
from lorafleet.tools.safetensors_file import Entry, write_safetensors


def test_the_library_reads_what_is_written(tmp_path):
    tensors = {
        "half": torch.randn(3).bfloat16(),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "matrix": torch.randn(4, 6).T,
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "one of a row, whose stride stays in contiguous()": torch.randn(1, 6).T[:1],
    }
    asked = []
    entries = {name: Entry(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    write_safetensors(tmp_path / "x", entries, lambda name: asked.append(name) or tensors[name])
    assert sorted(asked) == sorted(tensors)
    with safe_open(tmp_path / "x", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        for name, tensor in tensors.items():
            torch.testing.assert_close(file.get_tensor(name), tensor, atol=0, rtol=0)


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    with pytest.raises(FileNotFoundError), new_folder(tmp_path / "a") as draft:
        (draft / "file").read_text()
    assert not list(tmp_path.iterdir())
    with new_folder(tmp_path / "a") as draft:
        (draft / "file").write_text("whole")
    assert (tmp_path / "a" / "file").read_text() == "whole"
    with pytest.raises(ConfigError, match="already exists"), new_folder(tmp_path / "a"):
        pass
