"""Writes the header of a safetensors file for tensors whose bytes are elsewhere, as the safetensors library does.

So the same tensors have the same digest, whichever way they are pushed.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping

from lorafleet.protocol.adapter_formats.safetensors_header import VALUE_BYTES, TensorInfo

_ALIGNMENT = 8  # The library pads its header with spaces to a multiple of this.


def lay_out(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, TensorInfo]:
    """Returns the place of each tensor, in the library's order.

    Args:
        tensors: For each name, a dtype of VALUE_BYTES and a shape.
    """
    infos: dict[str, TensorInfo] = {}
    end = 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: (-VALUE_BYTES[item[1][0]], item[0])):
        start, end = end, end + math.prod(shape) * VALUE_BYTES[dtype]
        infos[name] = TensorInfo(shape, dtype, start, end)
    return infos


def write_header(infos: Mapping[str, TensorInfo]) -> bytes:
    """Returns what safetensors writes before these tensors, including its length."""
    by_place = sorted(infos.items(), key=lambda item: (item[1].start, item[1].end))
    entries = {
        name: {"dtype": info.dtype, "shape": info.shape, "data_offsets": (info.start, info.end)}
        for name, info in by_place
    }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
