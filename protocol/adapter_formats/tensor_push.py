"""The body of a push from memory: a head with the config and a checksum of each tensor, then the tensors' bytes.

    8 bytes      length of the head, little-endian
    head         JSON: {"config": adapter_config.json's object, "sha256": {tensor's name: hex digest of its bytes}}
    the rest     the content of a safetensors file

A trainer that has one flat buffer sends it as it is, with {"config": …, "bucket": [entries]} as the head
(tensor_bucket.py).

Nothing in a body is executed or unpickled. All tensors have a checksum, so that no damaged byte is served.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from lorafleet.protocol.adapter_formats.adapter_files import MAX_CONFIG_BYTES
from lorafleet.protocol.adapter_formats.safetensors_header import MAX_HEADER_BYTES, parse_header
from lorafleet.protocol.adapter_formats.safetensors_layout import write_header
from lorafleet.protocol.adapter_formats.tensor_bucket import read_bucket, read_entries
from lorafleet.protocol.errors import AdapterMalformed
from lorafleet.protocol.strict_json import read_json_object, shown

MAX_PUSH_BYTES = 4 << 30  # A replica holds the whole body in memory; larger adapters are uploaded as files.
MAX_HEAD_BYTES = MAX_CONFIG_BYTES + MAX_HEADER_BYTES

_NAME = "the body"
_HEADER = "the safetensors header"
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class PushedTensors:
    config: bytes  # Content of adapter_config.json.
    weights: memoryview  # Content of a safetensors file.


def write_head(config: Mapping[str, object], weights: bytes) -> bytes:
    """Returns the part of a body that comes before the weights. Raises AdapterMalformed."""
    sums = TensorSums(len(weights))
    sums.advance(memoryview(weights), len(weights))
    return write_config_head(config, {"sha256": sums.computed()})


def write_config_head(config: Mapping[str, object], fields: Mapping[str, object]) -> bytes:
    """Returns a head with the config and other fields, and its length before it."""
    head = json.dumps({"config": config, **fields}).encode()
    return _LENGTH.pack(len(head)) + head


@dataclass(frozen=True, slots=True)
class PushHead:
    """The head of a body, and the content that it announces."""

    config: bytes  # Content of adapter_config.json.
    header: bytes  # Begins the safetensors file, before the rest of the body. It is empty if the rest is such a file.
    sums: Mapping[str, object]  # Checksum of each tensor, as the client has sent it.

    @classmethod
    def parse(cls, head: bytes, rest_bytes: int) -> PushHead:
        """Reads the head of a body with so many bytes behind it. Raises AdapterMalformed."""
        match read_json_object(head, "the body's head"):
            case {"config": dict(config), "sha256": dict(sums), **more} if not more:
                return cls(write_config(config), b"", sums)
            case {"config": dict(config), "bucket": bucket, **more} if not more:
                tensors = read_entries(bucket, rest_bytes)
                header = write_header({name: tensor.info for name, tensor in tensors.items()})
                return cls(write_config(config), header, {name: tensor.sha256 for name, tensor in tensors.items()})
        raise AdapterMalformed(
            "the body's head must have the object `config` and either the object `sha256` or the list `bucket`, and "
            "nothing else."
        )


def write_config(config: Mapping[str, object]) -> bytes:
    """Returns the content of adapter_config.json. Equal configs have equal bytes, so that equal pushes are one
    version."""
    return json.dumps(config, sort_keys=True).encode()


def read_bucket_file(data: memoryview) -> memoryview:
    """Reads a bucket without a config: the length of a head, {"bucket": [entries]} and the buffer. Returns the content
    of a safetensors file in the same memory. Raises AdapterMalformed."""
    size = part_length(data[:8], MAX_HEAD_BYTES, len(data), "its head")
    assert size is not None, "all bytes are there"
    fields = read_json_object(bytes(data[8 : 8 + size]), "the bucket's head")
    if fields.keys() != {"bucket"}:
        raise AdapterMalformed("the bucket's head must have the list `bucket`, and nothing else.")
    return read_bucket(data, 8 + size, fields["bucket"])


def check_sums(weights: memoryview, sums: Mapping[str, object], field: str) -> None:
    """Compares the tensors of a safetensors file with checksums by their names. Raises AdapterMalformed."""
    computing = TensorSums(len(weights))
    computing.advance(weights, len(weights))
    compare_sums(computing.computed(), sums, field)


def compare_sums(computed: Mapping[str, str], sums: Mapping[str, object], field: str) -> None:
    """Compares checksums of tensors with those that `field` of the body has. Raises AdapterMalformed."""
    for name in computed.keys() ^ sums.keys():
        fault = "has no checksum" if name in computed else "has a checksum but no bytes"
        raise AdapterMalformed(f"the tensor {shown(name)} {fault}; `{field}` must name each tensor of the body.")
    for name, found in computed.items():
        if found != sums[name]:
            raise AdapterMalformed(f"the bytes of the tensor {shown(name)} do not match their checksum; send it again.")


class TensorSums:
    """Computes the checksum of each tensor of a safetensors file in memory, while its bytes arrive there."""

    def __init__(self, file_bytes: int) -> None:
        """Raises AdapterMalformed if a file of this size is too short for its format."""
        self._file_bytes = file_bytes
        self._has_header = False
        self._open: list[tuple[str, int]] = []  # Tensors that have not ended, with their ends. The last is next.
        self._position = 0  # Of the next byte that is added to a checksum.
        self._sum = hashlib.sha256()
        self._computed: dict[str, str] = {}
        check_file_size(file_bytes)

    def advance(self, file: memoryview, num_arrived: int) -> None:
        """Adds the bytes of the file that have arrived since the last call. Raises AdapterMalformed."""
        if not self._has_header:
            self._read_header(file, num_arrived)
        while self._open and self._position < num_arrived:
            until = min(self._open[-1][1], num_arrived)
            self._sum.update(file[self._position : until])
            self._position = until
            self._end_tensors()

    def computed(self) -> Mapping[str, str]:
        """Returns the checksums, by the tensors' names. Call it once all bytes are added."""
        assert self._has_header and not self._open, (
            "parse_header() has checked that the tensors end where the file does"
        )
        return self._computed

    def _read_header(self, file: memoryview, num_arrived: int) -> None:
        size = part_length(file[: min(8, num_arrived)], MAX_HEADER_BYTES, self._file_bytes, _HEADER)
        if size is None or num_arrived < 8 + size:
            return
        self._position = start = 8 + size
        infos = parse_header(bytes(file[8:start]), self._file_bytes - start, _NAME)
        in_order = sorted(infos.items(), key=lambda item: (item[1].start, item[1].end), reverse=True)
        self._open = [(name, start + info.end) for name, info in in_order]
        self._has_header = True
        self._end_tensors()

    def _end_tensors(self) -> None:
        """Ends the tensors whose last byte was added. Several end here if some have no bytes."""
        while self._open and self._open[-1][1] == self._position:
            name, _ = self._open.pop()
            self._computed[name] = self._sum.hexdigest()
            self._sum = hashlib.sha256()


def check_file_size(file_bytes: int) -> None:
    """Raises AdapterMalformed if a safetensors file of this size is too short to have a header."""
    part_length(b"", MAX_HEADER_BYTES, file_bytes, _HEADER)


def part_length(arrived: bytes | bytearray | memoryview, most: int, whole_bytes: int, part: str) -> int | None:
    """Returns the length of a part that begins with its length in 8 bytes, or None until these have arrived.

    Raises AdapterMalformed if the part would have more than `most` bytes, or more than the whole has.
    """
    if len(arrived) < 8 <= whole_bytes:
        return None
    size: int = _LENGTH.unpack(arrived[:8])[0] if whole_bytes >= 8 else most + 1
    if size > min(most, whole_bytes - 8):
        raise AdapterMalformed(
            f"{_NAME} of {whole_bytes} bytes is truncated, or is no push of tensors: {part} must begin with its "
            f"length, of at most {most}, in 8 bytes."
        )
    return size
