"""Holds the logprobs of a growing answer in a tenth of the memory that they take as objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from lorafleet.protocol.messages import TokenLogprobs

_ENTRIES_OF_A_PACK = 32

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[TokenLogprobs]).decode


class PackedLogprobs:
    """The logprobs of the tokens of one answer, in their order. `num_bytes` is about the memory that they take."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._packs: list[bytes] = []
        self._last: list[TokenLogprobs] = []  # Not yet packed.

    def extend(self, entries: Iterable[TokenLogprobs]) -> None:
        for entry in entries:
            self._last.append(entry)
            if len(self._last) == _ENTRIES_OF_A_PACK:
                self._packs.append(_encode(self._last))
                self.num_bytes += len(self._packs[-1])
                self._last.clear()

    def __len__(self) -> int:
        return _ENTRIES_OF_A_PACK * len(self._packs) + len(self._last)

    def __iter__(self) -> Iterator[TokenLogprobs]:
        for pack in self._packs:
            yield from _decode(pack)
        yield from self._last
