"""Turns an adapter's weights file into named tensors: first their shapes, and later, on request, their values.

protocol/adapter_formats has safetensors_header.py and torch_archive.py, which read the shapes in the two formats. This
module adds the values. peft_names.py and adapter_parts.py interpret the names and shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from lorafleet.protocol.adapter_formats.adapter_files import SAFETENSORS_NAME, OpenFile
from lorafleet.protocol.adapter_formats.safetensors_header import TensorInfo, parse_header, read_header
from lorafleet.protocol.adapter_formats.torch_archive import TorchArchive
from lorafleet.protocol.adapter_formats.torch_index import StoredTensor
from lorafleet.protocol.yield_gil import yielding_gil

if TYPE_CHECKING:
    from hashlib import _Hash

FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INDEX_DTYPES = {"U8": torch.uint8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64}
_DTYPES = FLOAT_DTYPES | INDEX_DTYPES
_STORED_DTYPES = _DTYPES | {"bool": torch.bool, "int8": torch.int8}  # of torch_index.py


class WeightsFile(Protocol):
    infos: Mapping[str, TensorInfo]

    def load(self) -> LoadedTensors:
        """Returns the values, on the CPU. By then every byte of the file has gone into the digest."""


@dataclass(frozen=True, slots=True)
class LoadedTensors:
    """The values of all tensors of a file, on the CPU."""

    by_name: Mapping[str, Tensor]
    all_values: Tensor | None  # the values of all tensors as one, if they share a dtype and lie together


def read_weights(file: OpenFile, digest: _Hash) -> WeightsFile:
    return SafetensorsFile(file, digest) if file.name == SAFETENSORS_NAME else TorchFile(file, digest)


class SafetensorsFile:
    """Reads the bytes once, into memory, since a mapped file that shrinks under its reader kills the process."""

    def __init__(self, file: OpenFile, digest: _Hash) -> None:
        self._file = file
        self._digest = digest
        header = read_header(file, digest)
        self._data_bytes = file.size - 8 - len(header)
        self.infos: Mapping[str, TensorInfo] = parse_header(header, self._data_bytes, file.name)

    def load(self) -> LoadedTensors:
        memory = np.empty(self._data_bytes, np.uint8)  # numpy uses huge pages, torch does not
        self._file.read_into(memory.data, self._digest)
        self._file.check_unchanged()
        data = torch.from_numpy(memory)
        by_name = {name: _view(data, info) for name, info in yielding_gil(self.infos.items()) if info.dtype in _DTYPES}
        dtypes = {FLOAT_DTYPES.get(info.dtype) for info in self.infos.values()}
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        return LoadedTensors(by_name, None if dtype is None else data.view(dtype))


def _view(data: Tensor, info: TensorInfo) -> Tensor:
    dtype = _DTYPES[info.dtype]
    raw = data[info.start : info.end]
    if info.start % dtype.itemsize:
        raw = raw.clone()  # torch reads only aligned values
    return raw.view(dtype).view(info.shape)


class TorchFile:
    """Reads the legacy adapter_model.bin whole, without torch.load: see torch_archive.py."""

    def __init__(self, file: OpenFile, digest: _Hash) -> None:
        self._archive = TorchArchive(file, digest)
        self.infos = self._archive.infos

    def load(self) -> LoadedTensors:
        return LoadedTensors({key: self._value(t) for key, t in yielding_gil(self._archive.tensors.items())}, None)

    def _value(self, tensor: StoredTensor) -> Tensor:
        dtype = _STORED_DTYPES[tensor.dtype]
        if 0 in tensor.shape:
            return torch.empty(tensor.shape, dtype=dtype)
        start = self._archive.start(tensor)
        values = torch.frombuffer(self._archive.data, dtype=dtype, count=tensor.num_values, offset=start)
        # Only these values are copied, since several tensors may be views of one large record.
        return values.as_strided(tensor.shape, tensor.stride, tensor.offset).clone(
            memory_format=torch.contiguous_format
        )
