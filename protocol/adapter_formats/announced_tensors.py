"""Reads the list of tensors that come to a replica outside a request's body, from a process group or a GPU's memory.

    {"name": "…", "dtype": "bfloat16", "shape": [8, 128]}

dtypes have torch's names. Each tensor goes to its place in a safetensors file as the safetensors library would write
it. So the digest does not depend on the order of the list, and is that of an ordinary push of the same tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from lorafleet.protocol.adapter_formats.safetensors_header import MAX_HEADER_BYTES, MAX_TENSORS
from lorafleet.protocol.adapter_formats.safetensors_layout import lay_out, write_header
from lorafleet.protocol.adapter_formats.tensor_bucket import DTYPES, MAX_DIMENSIONS
from lorafleet.protocol.adapter_formats.tensor_push import (
    MAX_PUSH_BYTES,
    write_config,
)
from lorafleet.protocol.errors import AdapterMalformed, BodyTooLarge
from lorafleet.protocol.strict_json import read_json_object, shown
from lorafleet.protocol.yield_gil import yielding_gil

_NAME = "the list of tensors"
_MAX_SIZE = 1 << 48


class TensorPlace(msgspec.Struct, frozen=True, array_like=True):
    """One tensor that will come, and its place in the safetensors file."""

    dtype: str  # torch's name.
    shape: tuple[int, ...]
    start: int  # Position of its first byte in the file.
    num_bytes: int


@dataclass(frozen=True, slots=True)
class AnnouncedFile:
    """A safetensors file whose tensors are still to come."""

    header: bytes  # Begins the file, and includes the header's length.
    tensors: tuple[TensorPlace, ...]  # In the order in which they come.
    num_bytes: int  # Size of the file.


@dataclass(frozen=True, slots=True)
class AnnouncedPush:
    """The head of a push whose tensors come from elsewhere: it is the whole content of the request's body."""

    config: bytes  # Content of adapter_config.json.
    file: AnnouncedFile
    handle: str = ""  # Names memory of a GPU, as hexadecimal digits; "" if the tensors come from a process group.
    offset: int = 0  # Position of the first tensor in that memory. The others follow in the order of the list.

    @classmethod
    def parse(cls, head: bytes, from_device: bool) -> AnnouncedPush:
        """Reads the head of a push. Raises AdapterMalformed, and BodyTooLarge if the tensors have too many bytes."""
        match read_json_object(head, "the body's head"):
            case {"config": dict(config), "tensors": tensors, **more} if not more and not from_device:
                return cls(write_config(config), read_announced(tensors))
            case {
                "config": dict(config),
                "tensors": tensors,
                "handle": str(handle),
                "offset": int(offset),
                **more,
            } if not more and from_device and type(offset) is int and 0 <= offset < _MAX_SIZE:
                return cls(write_config(config), read_announced(tensors), handle, offset)
        raise AdapterMalformed(
            "the body's head must have the object `config` and the list `tensors`, for tensors in a GPU's memory also "
            "`handle` and `offset`, and nothing else."
        )


def read_announced(entries: object) -> AnnouncedFile:
    """Returns the file that the tensors of a list will fill. Raises AdapterMalformed, and BodyTooLarge if it is larger
    than a push from memory may be."""
    if not isinstance(entries, list) or not 0 < len(entries) <= MAX_TENSORS:
        raise AdapterMalformed(f"`tensors` must be a list with one entry per tensor, of 1 to {MAX_TENSORS}.")
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for entry in yielding_gil(entries):
        name, dtype, shape = _read_entry(entry)
        if name in tensors:
            raise AdapterMalformed(f"{_NAME} has two entries for the tensor {shown(name)}.")
        tensors[name] = dtype, shape
    return announce(tensors)


def announce(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> AnnouncedFile:
    """Returns the file for tensors with torch's dtypes and shapes by their names, which come in this order. Raises
    AdapterMalformed and BodyTooLarge."""
    infos = lay_out({name: (DTYPES[dtype], shape) for name, (dtype, shape) in tensors.items()})
    header = write_header(infos)
    if len(header) > MAX_HEADER_BYTES:
        raise AdapterMalformed(
            f"{_NAME} makes a header of {len(header)} bytes; a safetensors file may have {MAX_HEADER_BYTES}."
        )
    num_bytes = len(header) + max(info.end for info in infos.values())
    if num_bytes > MAX_PUSH_BYTES:
        raise BodyTooLarge(
            f"The tensors have {num_bytes} bytes; a push from memory may have at most {MAX_PUSH_BYTES}. Upload the "
            "adapter's files instead, with `lorafleet adapters push NAME FOLDER`."
        )
    places = tuple(
        TensorPlace(dtype, shape, len(header) + infos[name].start, infos[name].end - infos[name].start)
        for name, (dtype, shape) in tensors.items()
    )
    return AnnouncedFile(header, places, num_bytes)


def complete_until(tensors: Sequence[TensorPlace], file_bytes: int) -> list[int]:
    """Returns for each tensor how many bytes of the file are complete from its beginning on when that tensor and all
    before it have come."""
    complete, first_missing = [0] * len(tensors), file_bytes
    for index in reversed(range(len(tensors))):
        complete[index] = first_missing
        first_missing = min(first_missing, tensors[index].start)
    return complete


def _read_entry(entry: object) -> tuple[str, str, tuple[int, ...]]:
    match entry:
        case {"name": str(name), "dtype": str(dtype), "shape": list(shape), **rest} if (
            not rest and len(shape) <= MAX_DIMENSIONS and _are_sizes(shape) and _is_name(name)
        ):
            if dtype not in DTYPES:
                raise AdapterMalformed(
                    f"the tensor {shown(name)} has the dtype {shown(dtype)}; a push may have {', '.join(DTYPES)}."
                )
            return name, dtype, tuple(shape)
    raise AdapterMalformed(
        f"{_NAME} describes a tensor wrongly: {shown(entry)}. An entry has `name`, `dtype` and `shape`, and nothing "
        "else."
    )


def _are_sizes(shape: list[object]) -> bool:
    sizes = [size for size in shape if type(size) is int and 0 <= size < _MAX_SIZE]
    return len(sizes) == len(shape) and math.prod(sizes) < _MAX_SIZE


def _is_name(name: str) -> bool:
    try:
        return bool(name.encode()) and name != "__metadata__"
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
