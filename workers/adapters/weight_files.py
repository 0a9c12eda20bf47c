"""Turns an adapter's weights file into named tensors: first their shapes, and later, on request, their values.

protocol/adapter_formats has safetensors_header.py and torch_archive.py, which read the shapes in the two formats. This
module adds the values. peft_names.py and adapter_parts.py interpret the names and shapes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lorafleet.protocol.adapter_formats.adapter_files import SAFETENSORS_NAME, OpenFile
from lorafleet.protocol.adapter_formats.safetensors_header import (
    MAX_HEADER_BYTES,
    TensorInfo,
    parse_header,
    read_header,
)
from lorafleet.protocol.adapter_formats.tensor_push import part_length
from lorafleet.protocol.adapter_formats.torch_archive import TorchArchive
from lorafleet.protocol.adapter_formats.torch_index import StoredTensor
from lorafleet.protocol.yield_gil import yielding_gil
from lorafleet.workers.adapters.casting import max_magnitude
from lorafleet.workers.adapters.content_digest import done
from lorafleet.workers.adapters.parallel_reading import ParallelReader, ReadValues

FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INDEX_DTYPES = {"U8": torch.uint8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64}
_DTYPES = FLOAT_DTYPES | INDEX_DTYPES
_ALIGNMENT = max(dtype.itemsize for dtype in _DTYPES.values())
_STORED_DTYPES = _DTYPES | {"bool": torch.bool, "int8": torch.int8}  # of torch_index.py


class WeightsFile(Protocol):
    infos: Mapping[str, TensorInfo]

    def load(self) -> LoadedTensors:
        """Returns the values, on the CPU."""


@dataclass(frozen=True, slots=True)
class ReadTargets:
    """Memory into which tensors are read, so that they need not be copied there later."""

    block: Tensor  # uint8; the memory is valid as long as this tensor, and 0 where no tensor lies
    offset: Mapping[str, int]  # in the block, for some of the tensors


@dataclass(frozen=True, slots=True)
class LoadedTensors:
    """The values of all tensors of a file, on the CPU."""

    by_name: Mapping[str, Tensor]
    largest: Tensor | None  # the largest magnitude of all values, if they share a dtype and lie together
    digest: Future[str]  # sha256 (hex) of the values and of all that had gone into the digest before


def read_weights(
    file: OpenFile, digest: hashlib._Hash, reader: ParallelReader | None = None, expected_digest: str = ""
) -> WeightsFile:
    """Reads the shapes of the file's tensors.

    Args:
        digest: A hash of all that comes before the file in the adapter's content.
        reader: Threads that read the values. With them, load() returns before the digest is known.
        expected_digest: The digest that the content should have, or "".
    """
    if file.name == SAFETENSORS_NAME:
        return SafetensorsFile(file, digest, reader, expected_digest)
    return TorchFile(file, digest)


class SafetensorsFile:
    """Reads the bytes once, into memory, since a mapped file that shrinks under its reader kills the process."""

    def __init__(
        self, file: OpenFile, digest: hashlib._Hash, reader: ParallelReader | None = None, expected_digest: str = ""
    ) -> None:
        self._file = file
        self._digest = digest
        self._reader = reader
        self._expected_digest = expected_digest
        header = read_header(file, digest)
        self._data_bytes = file.size - 8 - len(header)
        self.infos: Mapping[str, TensorInfo] = parse_header(header, self._data_bytes, file.name)

    def load(self) -> LoadedTensors:
        data = _bytes(self._data_bytes)
        if self._reader is None or not self._reader.takes(self._data_bytes):
            read = self._read(data)
        else:
            read = self._reader.read(self._file, data, shared_dtype(self.infos), self._digest, self._expected_digest)
        self._file.check_unchanged()
        return LoadedTensors(_views(data, self.infos), read.largest, read.digest)

    @property
    def can_place(self) -> bool:
        """Whether load_into() may be called: threads must be worth their while, and all values share a dtype."""
        takes = self._reader is not None and self._reader.takes(self._data_bytes)
        return takes and shared_dtype(self.infos) is not None

    def load_into(self, targets: ReadTargets) -> LoadedTensors:
        """As load(), but reads each tensor to the place that it has, if it has one."""
        dtype = shared_dtype(self.infos)
        assert self._reader is not None and dtype is not None
        in_order = sorted(self.infos.items(), key=lambda item: item[1].start)  # without holes, as parse_header checks
        others = _bytes(sum(info.end - info.start for name, info in in_order if name not in targets.offset))
        block_bytes, other_bytes, offset = targets.block.numpy().data, others.numpy().data, 0
        parts: list[memoryview] = []
        raw: dict[str, Tensor] = {}
        for name, info in yielding_gil(in_order):
            size, place = info.end - info.start, targets.offset.get(name)
            if place is None:
                raw[name] = others[offset : offset + size]
                parts.append(other_bytes[offset : offset + size])
                offset += size
            else:
                raw[name] = targets.block[place : place + size]
                parts.append(block_bytes[place : place + size])
        memory = [memory for memory in (targets.block, others) if memory.numel()]
        read = self._reader.read_scattered(self._file, parts, memory, dtype, self._digest, self._expected_digest)
        self._file.check_unchanged()
        views = {name: _view(values, self.infos[name]) for name, values in yielding_gil(raw.items())}
        return LoadedTensors(views, read.largest, read.digest)

    def _read(self, data: Tensor) -> ReadValues:
        self._file.read_into(data.numpy().data, self._digest)
        dtype = shared_dtype(self.infos)
        largest = None if dtype is None or not len(data) else max_magnitude(data.view(dtype))
        return ReadValues(largest, done(self._digest.hexdigest()))


def shared_dtype(infos: Mapping[str, TensorInfo]) -> torch.dtype | None:
    """Returns the float dtype that all tensors share, or None."""
    dtypes = {FLOAT_DTYPES.get(info.dtype) for info in infos.values()}
    return dtypes.pop() if len(dtypes) == 1 else None


def _bytes(count: int) -> Tensor:
    return torch.from_numpy(np.empty(count, np.uint8))  # numpy uses huge pages, torch does not


def _views(data: Tensor, infos: Mapping[str, TensorInfo]) -> dict[str, Tensor]:
    return {
        name: _view(data[info.start : info.end], info)
        for name, info in yielding_gil(infos.items())
        if info.dtype in _DTYPES
    }


def _view(raw: Tensor, info: TensorInfo) -> Tensor:
    dtype = _DTYPES[info.dtype]
    if not raw.numel():
        return torch.empty(info.shape, dtype=dtype)
    if raw.storage_offset() % dtype.itemsize:
        raw = raw.clone()  # torch reads only aligned values
    return raw.view(dtype).view(info.shape)


class MemoryFile:
    """A safetensors file in memory that nobody can change, whose digest is known. Its tensors are views of it.

    Raises AdapterMalformed.
    """

    def __init__(self, content: memoryview, digest: str, reader: ParallelReader | None = None) -> None:
        self._digest = digest
        self._reader = reader
        size = part_length(content, MAX_HEADER_BYTES, len(content), "the safetensors header")
        assert size is not None, "all bytes are there"
        start = 8 + size
        self.infos: Mapping[str, TensorInfo] = parse_header(bytes(content[8:start]), len(content) - start, "the push")
        self._values = content[start:]
        self._is_aligned = start % _ALIGNMENT == 0

    def load(self) -> LoadedTensors:
        values = np.frombuffer(self._values, np.uint8)
        data = torch.from_numpy(values if self._is_aligned else values.copy())
        dtype, largest = shared_dtype(self.infos), None
        if dtype is not None and len(data):
            largest = max_magnitude(data.view(dtype)) if self._reader is None else self._reader.largest(data, dtype)
        return LoadedTensors(_views(data, self.infos), largest, done(self._digest))


class TorchFile:
    """Reads the legacy adapter_model.bin whole, without torch.load: see torch_archive.py."""

    def __init__(self, file: OpenFile, digest: hashlib._Hash) -> None:
        self._archive = TorchArchive(file, digest)
        self._digest = digest
        self.infos = self._archive.infos

    def load(self) -> LoadedTensors:
        by_name = {key: self._value(t) for key, t in yielding_gil(self._archive.tensors.items())}
        return LoadedTensors(by_name, None, done(self._digest.hexdigest()))

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
