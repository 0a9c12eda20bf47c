"""The bytes of adapter_model.safetensors: its header, offsets, lengths."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from typing import Any

from lorafleet.protocol.errors import AdapterMalformed, AdapterUnsupported
from tests.workers.adapters.bad_adapters.damage import Q0, Case, Damage, Evil, joined, parted, saved, weights_are


def header_is(change: Callable[[dict[str, Any]], object]) -> Damage:
    def rewrite(data: bytes) -> bytes:
        header, body = parted(data)
        change(header)
        return joined(header, body)

    return weights_are(rewrite)


def raw_header(text: bytes) -> Damage:
    return weights_are(lambda _: joined(text))


def many_tensors(a: Any) -> None:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    weights_are(lambda _: joined({f"t{i}": entry for i in range(50_000)}))(a)


def entry(**changes: object) -> Damage:
    return header_is(lambda h: h[f"{Q0}.lora_A.weight"].update(changes))


def tiny_tensors(count: int) -> Damage:
    def damage(a: Any) -> None:
        entries = {f"t{i}": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i in range(count)}
        weights_are(lambda _: joined(entries, bytes(count)))(a)

    return damage


def said_length(size: int) -> Damage:
    return weights_are(lambda d: struct.pack("<Q", size) + d[8:])


def cut_in_header(d: bytes) -> bytes:
    (size,) = struct.unpack("<Q", d[:8])
    return d[: 8 + size - 1]


def cut_behind_header(d: bytes) -> bytes:
    (size,) = struct.unpack("<Q", d[:8])
    return d[: 8 + size + 1]


CASES: dict[str, Case] = {
    "empty weights": (weights_are(lambda _: b""), AdapterMalformed, "truncated"),
    "truncated in the header": (weights_are(lambda d: d[:100]), AdapterMalformed, "truncated"),
    "truncated in the data": (weights_are(lambda d: d[:-5]), AdapterMalformed, "truncated"),
    "bytes at the end": (weights_are(lambda d: d + b"PK"), AdapterMalformed, "belong to no tensor"),
    "pickle, renamed": (weights_are(lambda _: pickle.dumps(Evil())), AdapterMalformed, "not a safetensors file"),
    "header bomb": (weights_are(lambda d: struct.pack("<Q", 1 << 62) + d[8:]), AdapterMalformed, "header"),
    "header is no JSON": (raw_header(b"{]"), AdapterMalformed, "not valid JSON"),
    "header key twice": (raw_header(b'{"a": 1, "a": 2}'), AdapterMalformed, "occurs twice"),
    "header nested deeply": (raw_header(b'{"a":' * 50_000), AdapterMalformed, "nested too deeply"),
    "many tensors": (many_tensors, AdapterMalformed, "50000 tensors"),
    "negative offset": (entry(data_offsets=[-512, 0]), AdapterMalformed, "wrongly"),
    "offsets backwards": (entry(data_offsets=[512, 0]), AdapterMalformed, "wrongly"),
    "hole": (entry(data_offsets=[8, 520]), AdapterMalformed, "hole"),
    "overlap": (
        header_is(lambda h: h[f"{Q0}.lora_B.weight"].update(data_offsets=[256, 768])),
        AdapterMalformed,
        "overlaps",
    ),
    "shape beyond its bytes": (entry(shape=[4, 64]), AdapterMalformed, "do not hold"),
    "shape overflow": (entry(shape=[1 << 40, 1 << 40]), AdapterMalformed, "do not hold"),
    "shape of floats": (entry(shape=[4.0, 32]), AdapterMalformed, "wrongly"),
    "unknown entry key": (entry(stride=[1, 2]), AdapterMalformed, "wrongly"),
    "one byte": (weights_are(lambda d: d[:1]), AdapterMalformed, "truncated"),
    "a length and nothing else": (weights_are(lambda d: d[:8]), AdapterMalformed, "truncated"),
    "truncated at the header's end": (weights_are(cut_in_header), AdapterMalformed, "truncated"),
    "truncated behind the header": (weights_are(cut_behind_header), AdapterMalformed, "truncated"),
    "header of no length": (said_length(0), AdapterMalformed, "not valid JSON"),
    "header one byte too long": (said_length(10**6), AdapterMalformed, "truncated"),
    "header of 2^64 - 1": (said_length(2**64 - 1), AdapterMalformed, "header"),
    "header of 2^63": (said_length(2**63), AdapterMalformed, "header"),
    "header of 100 MB": (
        weights_are(lambda _: struct.pack("<Q", 100 << 20) + b" " * (100 << 20)),
        AdapterMalformed,
        "at most 8388608",
    ),
    "header of blanks": (raw_header(b" " * (8 << 20)), AdapterMalformed, "not valid JSON"),
    "header is not UTF-8": (raw_header(b'{"\xff": 1}'), AdapterMalformed, "UTF-8"),
    "header is a list": (raw_header(b"[1]"), AdapterMalformed, "must hold an object"),
    "NaN in the header": (raw_header(b'{"a": NaN}'), AdapterMalformed, "NaN"),
    "number of 10^5 digits in the header": (
        raw_header(b'{"a": ' + b"1" * 100_000 + b"}"),
        AdapterMalformed,
        "not acceptable JSON",
    ),
    "metadata of lists": (header_is(lambda h: h.update(__metadata__=[1])), AdapterMalformed, "__metadata__"),
    "10^5 tiny tensors": (tiny_tensors(100_000), AdapterMalformed, "100000 tensors"),
    "as many tensors as may be, all strangers": (tiny_tensors(20_000), AdapterMalformed, "'t0'"),
    "shape of 2^63": (entry(shape=[2**63, 1]), AdapterMalformed, "wrongly"),
    "shape whose product is 2^64": (entry(shape=[2**32, 2**32]), AdapterMalformed, "do not hold"),
    "shape of 10^30": (entry(shape=[10**30]), AdapterMalformed, "wrongly"),
    "negative shape": (entry(shape=[-4, -32]), AdapterMalformed, "wrongly"),
    "shape of 10^5 dimensions": (entry(shape=[1] * 100_000), AdapterMalformed, "do not hold"),
    "offset of 2^63": (entry(data_offsets=[0, 2**63]), AdapterMalformed, "wrongly"),
    "three offsets": (entry(data_offsets=[0, 512, 512]), AdapterMalformed, "wrongly"),
    "two tensors in one place": (
        header_is(lambda h: h[f"{Q0}.lora_B.weight"].update(data_offsets=[0, 512])),
        AdapterMalformed,
        "overlaps",
    ),
    "half as wide as it says": (entry(dtype="F16"), AdapterMalformed, "do not hold"),
    "twice as wide as it says": (entry(dtype="F64"), AdapterMalformed, "do not hold"),
    "truth for numbers": (entry(dtype="BOOL"), AdapterUnsupported, "BOOL"),
    "unheard-of numbers": (entry(dtype="Q7"), AdapterUnsupported, "Q7"),
    "no name of numbers": (entry(dtype=32), AdapterMalformed, "wrongly"),
    "torch's file, renamed": (lambda a: weights_are(lambda _: saved(a.tensors))(a), AdapterMalformed, "safetensors"),
}
