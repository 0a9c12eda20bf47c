"""Turns an adapter's weights file into named tensors: first their shapes, and later, on request, their values.

Shapes come first so that a safetensors file that does not fit is rejected before its gigabytes are read. This module
owns the two formats. peft_names.py and adapter_parts.py interpret the names and shapes.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from lorafleet.protocol.adapter_files import SAFETENSORS_NAME, OpenFile
from lorafleet.protocol.errors import AdapterMalformed, AdapterUnsupported
from lorafleet.protocol.strict_json import read_json_object, shown
from lorafleet.workers.adapters.torch_index import StoredTensor, read_index
from lorafleet.workers.adapters.yield_gil import giving_way

if TYPE_CHECKING:
    from hashlib import _Hash

MAX_TENSORS = 20_000  # plain LoRA on a 126-layer model has 1764
MAX_HEADER_BYTES = 8 << 20
MAX_PICKLE_BYTES = 16 << 20  # data.pkl of a .bin, which has names and shapes but no values
MAX_RECORDS = 4 * MAX_TENSORS  # in a .bin's archive
COUNT_BYTES = 16 << 20
_ENTRY = b"PK\1\2"  # begins each record's entry in an archive's list of records
FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INDEX_DTYPES = {"U8": torch.uint8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64}
_DTYPES = FLOAT_DTYPES | INDEX_DTYPES


@dataclass(frozen=True, slots=True)
class TensorInfo:
    shape: tuple[int, ...]
    dtype: str  # safetensors' name, such as "F32"
    start: int = 0  # in bytes from the end of the header
    end: int = 0


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
        by_name = {name: _view(data, info) for name, info in giving_way(self.infos.items()) if info.dtype in _DTYPES}
        dtypes = {FLOAT_DTYPES.get(info.dtype) for info in self.infos.values()}
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        return LoadedTensors(by_name, None if dtype is None else data.view(dtype))


def read_header(file: OpenFile, digest: _Hash) -> bytes:
    """Reads the header of a safetensors file, which must be at its beginning."""
    if file.size < 8:
        raise AdapterMalformed(f"{file.name} is truncated: it has {file.size} bytes.")
    prefix = bytearray(8)
    file.read_into(memoryview(prefix), digest)
    (size,) = struct.unpack("<Q", prefix)
    if size > min(MAX_HEADER_BYTES, file.size - 8):
        raise AdapterMalformed(
            f"{file.name} is not a safetensors file, or truncated: its header would have {size} bytes, "
            f"the file has {file.size}, and a header may have at most {MAX_HEADER_BYTES}."
        )
    header = bytearray(size)
    file.read_into(memoryview(header), digest)
    return bytes(header)


def _view(data: Tensor, info: TensorInfo) -> Tensor:
    dtype = _DTYPES[info.dtype]
    raw = data[info.start : info.end]
    if info.start % dtype.itemsize:
        raw = raw.clone()  # torch reads only aligned values
    return raw.view(dtype).view(info.shape)


def parse_header(header: bytes, data_bytes: int, name: str) -> dict[str, TensorInfo]:
    entries = read_json_object(header, f"{name}'s header")
    metadata = entries.pop("__metadata__", None)
    if metadata is not None and not isinstance(metadata, dict):
        raise AdapterMalformed(f"{name}'s header has a __metadata__ that is no object.")
    if len(entries) > MAX_TENSORS:
        raise AdapterMalformed(f"{name} has {len(entries)} tensors; at most {MAX_TENSORS} are read.")
    infos = {key: _parse_entry(key, entry, name) for key, entry in giving_way(entries.items())}
    _check_layout(infos, data_bytes, name)
    return infos


def _parse_entry(key: str, entry: object, name: str) -> TensorInfo:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(end)], **rest} if not rest:
            if all(type(n) is int and 0 <= n < 1 << 48 for n in (*shape, start, end)) and start <= end:
                return TensorInfo(tuple(shape), dtype, start, end)
    raise AdapterMalformed(f"{name}'s header describes the tensor {shown(key)} wrongly: {shown(entry)}.")


def _check_layout(infos: Mapping[str, TensorInfo], data_bytes: int, name: str) -> None:
    """Checks that the tensors fill the rest of the file without holes or overlaps, as the format requires."""
    position = 0
    for key, info in sorted(infos.items(), key=lambda item: (item[1].start, item[1].end)):
        if info.start != position:
            fault = "overlaps another" if info.start < position else "leaves a hole before it"
            raise AdapterMalformed(f"{name}: the tensor {shown(key)} {fault} (data_offsets {info.start}, {info.end}).")
        dtype = _DTYPES.get(info.dtype)
        if dtype is not None and math.prod(info.shape) * dtype.itemsize != info.end - info.start:
            raise AdapterMalformed(
                f"{name}: the tensor {shown(key)} has {info.end - info.start} bytes, which do not hold a {info.dtype} "
                f"of shape {shown(list(info.shape))}."
            )
        position = info.end
    if position != data_bytes:
        fault = "is truncated" if data_bytes < position else "has bytes that belong to no tensor"
        raise AdapterMalformed(f"{name} {fault}: its tensors need {position} bytes, and {data_bytes} are there.")


class TorchFile:
    """Reads the legacy adapter_model.bin whole, in torch's zip format only, without torch.load: see
    torch_index.py."""

    def __init__(self, file: OpenFile, digest: _Hash) -> None:
        self._file = file
        self._data = bytearray(file.size)
        file.read_into(memoryview(self._data), digest)
        file.check_unchanged()
        with _archive(self._data, file.name) as archive:
            self._records = {record.filename.partition("/")[2]: record for record in archive.infolist()}
            self._tensors = read_index(self._index(archive), file.name)
        if len(self._tensors) > MAX_TENSORS:
            raise AdapterMalformed(f"{file.name} has {len(self._tensors)} tensors; at most {MAX_TENSORS} are read.")
        for key, tensor in giving_way(self._tensors.items()):
            self._check(key, tensor)
        names = {dtype: short for short, dtype in _DTYPES.items()}
        self.infos: Mapping[str, TensorInfo] = {
            key: TensorInfo(t.shape, names.get(t.dtype, str(t.dtype).removeprefix("torch.")))
            for key, t in self._tensors.items()
        }

    def load(self) -> LoadedTensors:
        return LoadedTensors({key: self._value(t) for key, t in giving_way(self._tensors.items())}, None)

    def _index(self, archive: zipfile.ZipFile) -> bytes:
        record = self._records.get("data.pkl")
        if record is None:
            raise AdapterMalformed(f"{self._file.name} is a zip file without data.pkl, so torch did not write it.")
        if record.file_size > MAX_PICKLE_BYTES:
            raise AdapterMalformed(f"{self._file.name} has an index of more than {MAX_PICKLE_BYTES} bytes.")
        try:
            order = archive.read(self._records["byteorder"]) if "byteorder" in self._records else b"little"
            pickled = archive.read(record)
        except (zipfile.BadZipFile, RuntimeError, EOFError, *_NO_ARCHIVE):
            raise AdapterMalformed(f"{self._file.name} has a damaged record.") from None
        if order != b"little":
            raise AdapterUnsupported(f"{self._file.name} was written on a big-endian machine. Save it on another.")
        return pickled

    def _check(self, key: str, tensor: StoredTensor) -> None:
        """Raises AdapterMalformed unless the tensor's record exists, is aligned and holds what the index says."""
        name = self._file.name
        record = self._records.get(f"data/{tensor.record}")
        if record is None or record.file_size != tensor.num_values * tensor.dtype.itemsize:
            raise AdapterMalformed(f"{name}: the record of {shown(key)} is missing, or has another size than it says.")
        if math.prod(tensor.shape) > tensor.num_values:
            raise AdapterMalformed(f"{name}: {shown(key)} has more values than bytes: it repeats what it has.")
        if self._start(record) % tensor.dtype.itemsize:
            raise AdapterMalformed(f"{name}: the record of {shown(key)} is not aligned, as torch writes it.")
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride, strict=True))
        if 0 not in tensor.shape and tensor.offset + last >= tensor.num_values:
            raise AdapterMalformed(f"{name}: {shown(key)} reaches beyond its record.")
        self._start(record)

    def _start(self, record: zipfile.ZipInfo) -> int:
        """Returns the offset of the record's bytes in the file.

        They lie behind the record's own header, whose name and extra field have their own lengths.
        """
        header = record.header_offset
        if not 0 <= header <= len(self._data) - 30 or self._data[header : header + 4] != b"PK\3\4":
            raise AdapterMalformed(f"{self._file.name} has a damaged record.")
        name_bytes, extra_bytes = struct.unpack("<HH", self._data[header + 26 : header + 30])
        start: int = header + 30 + name_bytes + extra_bytes
        if start + record.file_size > len(self._data):
            raise AdapterMalformed(f"{self._file.name} has a record that reaches beyond the file's end.")
        return start

    def _value(self, tensor: StoredTensor) -> Tensor:
        if 0 in tensor.shape:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        start = self._start(self._records[f"data/{tensor.record}"])
        values = torch.frombuffer(self._data, dtype=tensor.dtype, count=tensor.num_values, offset=start)
        # Only these values are copied, since several tensors may be views of one large record.
        return values.as_strided(tensor.shape, tensor.stride, tensor.offset).clone(
            memory_format=torch.contiguous_format
        )


_NO_ARCHIVE = (ValueError, NotImplementedError, OverflowError, struct.error)


def _archive(data: bytearray, name: str) -> zipfile.ZipFile:
    """Opens the file as a zip archive.

    Its records must be uncompressed, as torch stores them, so that a small file cannot unpack to a large one.
    """
    steps = range(0, len(data), COUNT_BYTES)
    if sum(data.count(_ENTRY, start, start + COUNT_BYTES + 3) for start in giving_way(steps)) > MAX_RECORDS:
        raise AdapterMalformed(f"{name} has more than {MAX_RECORDS} records.")
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except (zipfile.BadZipFile, *_NO_ARCHIVE):
        raise AdapterMalformed(
            f"{name} is not in torch's zip format (a bare pickle is never opened), or truncated. "
            f"Save the adapter again with safetensors."
        ) from None
    records = archive.infolist()
    if any(r.compress_type != zipfile.ZIP_STORED for r in records) or sum(r.file_size for r in records) > len(data):
        raise AdapterMalformed(f"{name} has compressed records, which torch does not write.")
    return archive
