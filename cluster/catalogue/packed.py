"""The catalogue's entries as bytes, in the log's format. A million adapters take 0.4 GB in this form, and 1.2 GB as
objects. Unpacking one of them takes 2 us."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from lorafleet.cluster.catalogue.catalogue_records import AdapterRecord, Entry

Packed = bytes  # One entry, in msgpack.


class Head(msgspec.Struct, frozen=True, gc=False):
    """The fields of an entry that the log needs."""

    name: str
    type: Literal["adapter", "removed"]
    seeded_by: str | None = None


class PackedAdapters(Mapping[str, AdapterRecord]):
    """A mapping from names to adapters. It returns copies, and only put() and pop() change its content."""

    def __init__(self) -> None:
        self._packed: dict[str, bytes] = {}

    def __getitem__(self, name: str) -> AdapterRecord:
        return _adapter_decoder.decode(self._packed[name])

    def __contains__(self, name: object) -> bool:
        return name in self._packed

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)

    def put(self, name: str, packed: Packed) -> None:
        self._packed[name] = packed

    def differing(self, other: PackedAdapters) -> set[str]:
        """Returns the names of adapters that only one of the two mappings has, or that differ."""
        return {name for name, _ in self._packed.items() ^ other._packed.items()}

    def pop(self, name: str) -> AdapterRecord | None:
        packed = self._packed.pop(name, None)
        return None if packed is None else _adapter_decoder.decode(packed)


_encoder = msgspec.msgpack.Encoder()
_adapter_decoder = msgspec.msgpack.Decoder(AdapterRecord)
_entry_decoder: msgspec.msgpack.Decoder[Entry] = msgspec.msgpack.Decoder(Entry)
_head_decoder = msgspec.msgpack.Decoder(Head)


def pack(entry: Entry) -> bytes:
    return _encoder.encode(entry)


def unpack(packed: Packed) -> Entry:
    return _entry_decoder.decode(packed)


def head(packed: Packed | msgspec.Raw) -> Head:
    return _head_decoder.decode(packed)
