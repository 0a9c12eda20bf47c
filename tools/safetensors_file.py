"""Writes a safetensors file of any size with one tensor in memory at a time, which the library's own writer cannot
do."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.adapters.casting import as_words

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(path: Path, entries: Mapping[str, Entry], value_of: Callable[[str], Tensor]) -> None:
    """Writes the file and calls `value_of` once for each tensor. Raises ConfigError if the file cannot be written."""
    # Wide types come first, since readers want each tensor aligned to its element size.
    order = sorted(entries, key=lambda name: (-entries[name].dtype.itemsize, name))
    try:
        with path.open("xb") as file:
            file.write(_header(entries, order))
            for name in order:
                tensor = value_of(name)
                assert (tuple(tensor.shape), tensor.dtype) == (entries[name].shape, entries[name].dtype), name
                file.write(np.ascontiguousarray(as_words(tensor)).data)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error


def _header(entries: Mapping[str, Entry], order: list[str]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    end = 0
    for name in order:
        entry = entries[name]
        start, end = end, end + entry.num_bytes
        header[name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
