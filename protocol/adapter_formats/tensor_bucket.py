"""Reads a flat bucket: one buffer with the bytes of all tensors, and an entry for each tensor that says which are its.

    {"name": "…", "dtype": "bfloat16", "shape": [8, 128], "offset": 0, "sha256": "hex digest of its bytes"}

dtypes have torch's names. The tensors must fill the buffer without holes or overlaps, in any order. A bucket becomes a
safetensors file in place: the header is written over the bytes before the buffer, so no tensor is copied.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import NamedTuple

from lorafleet.protocol.adapter_formats.safetensors_header import MAX_TENSORS, VALUE_BYTES, TensorInfo, check_layout
from lorafleet.protocol.adapter_formats.safetensors_layout import write_header
from lorafleet.protocol.errors import AdapterMalformed
from lorafleet.protocol.strict_json import shown
from lorafleet.protocol.yield_gil import yielding_gil

MAX_DIMENSIONS = 8
# safetensors' names of dtypes, by torch's.
DTYPES: Mapping[str, str] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint8": "U8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
}
_NAME = "the bucket"


class BucketTensor(NamedTuple):
    info: TensorInfo
    sha256: str


def read_bucket(given: memoryview, start: int, entries: object) -> memoryview:
    """Returns the content of a safetensors file with the bucket's tensors, in the order of their bytes.

    Args:
        given: Writable. Its bytes from `start` on are the buffer. Those before it are overwritten.
        entries: The value that the sender's JSON has for the bucket, which was read from the bytes before `start`.

    Raises AdapterMalformed if an entry is wrong, or a tensor's bytes do not match its checksum.
    """
    values = given[start:]
    tensors = read_entries(entries, len(values))
    for name, (info, sha256) in yielding_gil(tensors.items()):
        if hashlib.sha256(values[info.start : info.end]).hexdigest() != sha256:
            raise AdapterMalformed(f"the bytes of the tensor {shown(name)} do not match their checksum; send it again.")
    header = write_header({name: tensor.info for name, tensor in tensors.items()})
    # An entry is longer than what the header has for the same tensor, because it has a checksum.
    assert len(header) <= start, (len(header), start)
    given[start - len(header) : start] = header
    return given[start - len(header) :]


def read_entries(entries: object, buffer_bytes: int) -> dict[str, BucketTensor]:
    """Returns the tensors of a bucket by their names. Raises AdapterMalformed, also if they do not fill the buffer."""
    if not isinstance(entries, list) or len(entries) > MAX_TENSORS:
        raise AdapterMalformed(f"`bucket` must be a list with one entry per tensor, of at most {MAX_TENSORS}.")
    tensors: dict[str, BucketTensor] = {}
    for entry in yielding_gil(entries):
        name, tensor = _read_entry(entry)
        if name in tensors:
            raise AdapterMalformed(f"{_NAME} has two entries for the tensor {shown(name)}.")
        tensors[name] = tensor
    check_layout({name: tensor.info for name, tensor in tensors.items()}, buffer_bytes, _NAME)
    return tensors


def _read_entry(entry: object) -> tuple[str, BucketTensor]:
    match entry:
        case {
            "name": str(name),
            "dtype": str(dtype),
            "shape": list(shape),
            "offset": int(offset),
            "sha256": str(sha256),
            **rest,
        } if not rest and _are_sizes([*shape, offset]) and len(shape) <= MAX_DIMENSIONS and _is_text(name):
            if dtype not in DTYPES:
                raise AdapterMalformed(
                    f"the tensor {shown(name)} has the dtype {shown(dtype)}; a bucket may have {', '.join(DTYPES)}."
                )
            num_bytes = math.prod(shape) * VALUE_BYTES[DTYPES[dtype]]
            return name, BucketTensor(TensorInfo(tuple(shape), DTYPES[dtype], offset, offset + num_bytes), sha256)
    raise AdapterMalformed(
        f"{_NAME} describes a tensor wrongly: {shown(entry)}. An entry has `name`, `dtype`, `shape`, `offset` and "
        "`sha256`, and nothing else."
    )


def _are_sizes(numbers: list[object]) -> bool:
    return all(type(number) is int and 0 <= number < 1 << 48 for number in numbers)


def _is_text(name: str) -> bool:
    try:
        return bool(name.encode()) and name != "__metadata__"
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
