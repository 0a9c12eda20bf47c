"""Flat buckets: what they become, and what is wrong with one that is rejected."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from typing import Any

import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from lorafleet.protocol.adapter_formats.serialized_tensors import read_serialized
from lorafleet.protocol.adapter_formats.tensor_push import PushHead, check_sums
from lorafleet.protocol.errors import AdapterMalformed, AdapterUnsupported

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "é": np.zeros((0, 4), np.float32),
    "h": np.ones(3, np.half),
}
CONFIG = {"r": 1, "peft_type": "LORA"}


def framed(head: object, rest: bytes) -> bytearray:
    text = json.dumps(head).encode()
    return bytearray(struct.pack("<Q", len(text)) + text + rest)


def read_push(body: bytearray) -> tuple[bytes, bytes]:
    """Returns the config and the safetensors file of a body."""
    size = struct.unpack("<Q", body[:8])[0]
    rest = bytes(body[8 + size :])
    head = PushHead.parse(bytes(body[8 : 8 + size]), len(rest))
    check_sums(memoryview(head.header + rest), head.sums, "sha256")
    return head.config, head.header + rest


def bucket() -> tuple[list[dict[str, Any]], bytes]:
    """Returns the entries and the buffer, in safetensors' own order."""
    entries, buffer = [], b""
    for name, tensor in TENSORS.items():
        content = tensor.tobytes()
        digest = hashlib.sha256(content).hexdigest()
        fields = {"name": name, "dtype": tensor.dtype.name, "shape": list(tensor.shape), "offset": len(buffer)}
        entries.append(fields | {"sha256": digest})
        buffer += content
    return entries, buffer


def test_a_bucket_is_the_safetensors_file_of_the_same_tensors() -> None:
    entries, buffer = bucket()
    pushed = read_push(framed({"config": CONFIG, "bucket": entries}, buffer))
    assert pushed[1] == safetensors_numpy.save(TENSORS)
    shuffled = read_push(framed({"config": CONFIG, "bucket": entries[::-1]}, buffer))
    assert shuffled == pushed and json.loads(pushed[0]) == CONFIG


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offset": 16}, "overlaps another"),
        ({"offset": 32}, "leaves a hole"),
        ({"shape": [4]}, "is truncated"),
        ({"shape": [2]}, "belong to no tensor"),
        ({"offset": -1}, "describes a tensor wrongly"),
        ({"shape": [True, 3]}, "describes a tensor wrongly"),
        ({"shape": [1 << 48]}, "describes a tensor wrongly"),
        ({"shape": [1] * 8 + [3]}, "describes a tensor wrongly"),
        ({"numel": 3}, "describes a tensor wrongly"),
        ({"name": "\ud800"}, "describes a tensor wrongly"),
        ({"name": "__metadata__"}, "describes a tensor wrongly"),
        ({"name": "a"}, "two entries"),
        ({"dtype": "complex64"}, "the dtype 'complex64'"),
        ({"sha256": "0" * 64}, "do not match their checksum"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else None,
)
def test_a_wrong_entry_is_rejected(change: dict[str, Any], message: str) -> None:
    entries, buffer = bucket()
    entries[-1] |= change
    with pytest.raises(AdapterMalformed, match=message):
        read_push(framed({"config": CONFIG, "bucket": entries}, buffer))


@pytest.mark.parametrize(
    "head",
    [
        {"config": CONFIG},
        {"config": CONFIG, "bucket": {}},
        {"config": CONFIG, "bucket": [], "sha256": {}},
        {"bucket": []},
    ],
    ids=["neither", "no list", "both", "no config"],
)
def test_a_wrong_head_is_rejected(head: object) -> None:
    with pytest.raises(AdapterMalformed, match="bucket"):
        read_push(framed(head, b""))


def as_text(content: bytes | bytearray) -> str:
    return base64.b64encode(content).decode()


def test_sglangs_load_takes_safetensors_and_buckets_with_checksums() -> None:
    entries, buffer = bucket()
    sums: dict[str, object] = {entry["name"]: entry["sha256"] for entry in entries}
    whole = safetensors_numpy.save(TENSORS)
    for content, load_format in ((whole, "safetensors"), (framed({"bucket": entries}, buffer), "flattened_bucket")):
        copies = [as_text(content)] * 2
        pushed = read_serialized(copies, load_format, CONFIG, sums)  # type: ignore[arg-type]  # a Literal
        assert bytes(pushed.weights) == whole
    with pytest.raises(AdapterMalformed, match="`expected_checksums` must name each tensor"):
        read_serialized([as_text(whole)], "safetensors", CONFIG, {"a": sums["a"]})
    with pytest.raises(AdapterMalformed, match="do not match"):
        read_serialized([as_text(whole)], "safetensors", CONFIG, sums | {"a": "0"})
    with pytest.raises(AdapterMalformed, match="differ"):
        read_serialized([as_text(whole), as_text(buffer)], "safetensors", CONFIG, None)
    with pytest.raises(AdapterMalformed, match="not base64"):
        read_serialized([as_text(whole)[:-1] + "!"], "safetensors", CONFIG, None)


@pytest.mark.parametrize("load_format", ["safetensors", "flattened_bucket"])
def test_a_pickle_is_rejected_with_the_remedy(load_format: Any) -> None:
    with pytest.raises(AdapterUnsupported, match=r"safetensors\.torch\.save"):
        read_serialized([as_text(b"\x80\x04\x95" + b"." * 100)], load_format, CONFIG, None)


def test_a_header_whose_length_looks_like_a_pickle_is_read() -> None:
    """A header of 1152 bytes begins with 80 04, as a pickle of protocol 4 does."""
    found = next(
        whole
        for length in range(900, 1152)
        if (whole := safetensors_numpy.save({"n" * length: np.ones(2, np.float32)}))[:2] == b"\x80\x04"
    )
    assert bytes(read_serialized([as_text(found)], "safetensors", CONFIG, None).weights) == found
