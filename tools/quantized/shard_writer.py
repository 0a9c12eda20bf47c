"""Writes the weights of a checkpoint into safetensors files of bounded size, with one file in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from lorafleet.tools.safetensors_file import Entry, write_safetensors

INDEX = "model.safetensors.index.json"


class ShardWriter:
    """Collects tensors in memory, and writes a file whenever the next ones would make it larger than max_bytes.

    Tensors that are added together are in one file, which is larger than max_bytes if they alone are.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._waiting: dict[str, Tensor] = {}
        self._waiting_bytes = 0
        self._files: list[list[str]] = []  # Names of the tensors in each file that is written.
        self.num_bytes = 0  # of all tensors

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Adds tensors that stay in one file. Raises ConfigError if a file cannot be written."""
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        if self._waiting and self._waiting_bytes + num_bytes > self._max_bytes:
            self._write()
        self._waiting |= tensors
        self._waiting_bytes += num_bytes
        self.num_bytes += num_bytes

    def close(self) -> int:
        """Writes what remains, and the index if there are several files. Returns the number of files."""
        if self._waiting:
            self._write()
        count = len(self._files)
        if count == 1:
            self._draft(0).rename(self._folder / "model.safetensors")
            return count
        weight_map: dict[str, str] = {}
        for index, names in enumerate(self._files):
            file = f"model-{index + 1:05}-of-{count:05}.safetensors"
            self._draft(index).rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        contents = {"metadata": {"total_size": self.num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self._folder / INDEX).write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")
        return count

    def _write(self) -> None:
        entries = {name: Entry(tuple(tensor.shape), tensor.dtype) for name, tensor in self._waiting.items()}
        write_safetensors(self._draft(len(self._files)), entries, self._waiting.__getitem__)
        self._files.append(list(self._waiting))
        self._waiting, self._waiting_bytes = {}, 0

    def _draft(self, index: int) -> Path:
        return self._folder / f"model-{index + 1:05}.safetensors"
