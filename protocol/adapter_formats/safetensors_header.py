"""Reads the header of a safetensors file: the names, dtypes and shapes of its tensors, and where their values are.

Shapes come first so that a file that does not fit is rejected before its gigabytes are read.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lorafleet.protocol.adapter_formats.adapter_files import OpenFile
from lorafleet.protocol.errors import AdapterMalformed
from lorafleet.protocol.strict_json import read_json_object, shown
from lorafleet.protocol.yield_gil import yielding_gil

if TYPE_CHECKING:
    from hashlib import _Hash

MAX_TENSORS = 40_000  # plain LoRA on 128 experts in each of 48 layers has 37,248
MAX_HEADER_BYTES = 8 << 20
# Bytes of a value of each dtype that is read, by safetensors' names.
VALUE_BYTES: Mapping[str, int] = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "U8": 1, "I16": 2, "I32": 4, "I64": 8}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    shape: tuple[int, ...]
    dtype: str  # safetensors' name, such as "F32"
    start: int = 0  # in bytes from the end of the header
    end: int = 0


def read_header(file: OpenFile, digest: _Hash) -> bytes:
    """Reads the header of a safetensors file, which must be at its beginning."""
    if file.size < 8:
        raise AdapterMalformed(f"{file.name} is truncated: it has {file.size} bytes.")
    prefix = bytearray(8)
    file.read_into(memoryview(prefix), digest)
    (size,) = struct.unpack("<Q", prefix)
    if size > min(MAX_HEADER_BYTES, file.size - 8):
        raise AdapterMalformed(
            f"{file.name} is not a safetensors file, or is truncated: its header would have {size} bytes, the file "
            f"has {file.size}, and a header may have at most {MAX_HEADER_BYTES}."
        )
    header = bytearray(size)
    file.read_into(memoryview(header), digest)
    return bytes(header)


def parse_header(header: bytes, data_bytes: int, name: str) -> dict[str, TensorInfo]:
    entries = read_json_object(header, f"{name}'s header")
    metadata = entries.pop("__metadata__", None)
    if metadata is not None and not isinstance(metadata, dict):
        raise AdapterMalformed(f"{name}'s header has a __metadata__ that is not an object.")
    if len(entries) > MAX_TENSORS:
        raise AdapterMalformed(f"{name} has {len(entries)} tensors; at most {MAX_TENSORS} are read.")
    infos = {key: _parse_entry(key, entry, name) for key, entry in yielding_gil(entries.items())}
    check_layout(infos, data_bytes, name)
    return infos


def _parse_entry(key: str, entry: object, name: str) -> TensorInfo:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(end)], **rest} if not rest:
            if all(type(n) is int and 0 <= n < 1 << 48 for n in (*shape, start, end)) and start <= end:
                return TensorInfo(tuple(shape), dtype, start, end)
    raise AdapterMalformed(f"{name}'s header describes the tensor {shown(key)} wrongly: {shown(entry)}.")


def check_layout(infos: Mapping[str, TensorInfo], data_bytes: int, name: str) -> None:
    """Checks that the tensors fill the rest of the file without holes or overlaps, as the format requires."""
    position = 0
    for key, info in sorted(infos.items(), key=lambda item: (item[1].start, item[1].end)):
        if info.start != position:
            fault = "overlaps another" if info.start < position else "leaves a hole before it"
            raise AdapterMalformed(f"{name}: the tensor {shown(key)} {fault} (data_offsets {info.start}, {info.end}).")
        value_bytes = VALUE_BYTES.get(info.dtype)
        if value_bytes is not None and math.prod(info.shape) * value_bytes != info.end - info.start:
            raise AdapterMalformed(
                f"{name}: the tensor {shown(key)} has {info.end - info.start} bytes, which do not hold a {info.dtype} "
                f"of shape {shown(list(info.shape))}."
            )
        position = info.end
    if position != data_bytes:
        fault = "is truncated" if data_bytes < position else "has bytes that belong to no tensor"
        raise AdapterMalformed(f"{name} {fault}: its tensors need {position} bytes, but the file has {data_bytes}.")
