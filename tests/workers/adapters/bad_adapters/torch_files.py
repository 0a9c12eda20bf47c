"""The bytes of adapter_model.bin: code, bombs, formats of the past."""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable
from typing import Any

import torch

from lorafleet.protocol.errors import AdapterMalformed, AdapterUnsupported
from tests.workers.adapters.bad_adapters.damage import CANARY, EVIL_CODE, Q0, Case, Damage, Evil, saved


def bin_is(data: Callable[[Any], bytes]) -> Damage:
    def damage(a: Any) -> None:
        content = data(a)
        (a.path / "adapter_model.safetensors").unlink()
        (a.path / "adapter_model.bin").write_bytes(content)

    return damage


def zip_bomb(_: Any) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * (64 << 20))
    return buffer.getvalue()


def tar_of(_: Any) -> bytes:
    """torch's format before 0.4: a tar of pickles."""
    buffer, content = io.BytesIO(), pickle.dumps(Evil())
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in ("storages", "tensors", "pickle"):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def old_torch_file(a: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(a.tensors, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def zip_of(pickled: bytes, **records: bytes) -> bytes:
    """What torch.save would write around a pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in {"data.pkl": pickled, "version": b"3", "byteorder": b"little", **records}.items():
            archive.writestr(f"archive/{name}", data)
    return buffer.getvalue()


def opcodes(*parts: bytes) -> bytes:
    return b"\x80\x02" + b"".join(parts) + b"."


def text_op(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def tuple_key_bomb(_: Any) -> bytes:
    """A key of tuples in tuples, each twice in the next: hashing it takes 2^40 steps."""
    return zip_of(opcodes(b"}", b")", *[b"q\x00h\x00\x86"] * 40, b"K\x01", b"s"))


def bytearray_bomb(_: Any) -> bytes:
    """bytearray(10^11), which torch's weights_only lets a pickle call."""
    size = (10**11).to_bytes(6, "little")
    return zip_of(opcodes(b"}", text_op("a"), b"cbuiltins\nbytearray\n", b"\x8a\x06" + size, b"\x85R", b"s"))


def many_entries(_: Any) -> bytes:
    return zip_of(opcodes(b"}", b"(", *(text_op(f"t{i}") + b"K\x01" for i in range(100_000)), b"u"))


CASES: dict[str, Case] = {
    "bare pickle": (bin_is(lambda _: pickle.dumps(Evil())), AdapterMalformed, "zip format"),
    "code in a .bin": (bin_is(lambda _: saved({"a": Evil()})), AdapterUnsupported, "more than tensors"),
    "safetensors, renamed": (
        lambda a: (a.path / "adapter_model.safetensors").rename(a.path / "adapter_model.bin"),
        AdapterMalformed,
        "zip format",
    ),
    "a tar of pickles": (bin_is(tar_of), AdapterMalformed, "zip format"),
    "torch's format before 1.6": (bin_is(old_torch_file), AdapterMalformed, "zip format"),
    "code called by name": (
        bin_is(lambda _: zip_of(opcodes(b"cos\nsystem\n", text_op(f"touch {CANARY}"), b"\x85R"))),
        AdapterUnsupported,
        "more than tensors",
    ),
    "code as a tensor's function": (
        bin_is(lambda _: zip_of(opcodes(b"}", text_op("a"), b"ctorch\nload\n", text_op("/etc/passwd"), b"\x85Rs"))),
        AdapterUnsupported,
        "more than tensors",
    ),
    "a compiled program": (
        bin_is(lambda _: zip_of(opcodes(b"}"), **{"code/__torch__.py": EVIL_CODE.encode(), "constants.pkl": b"N."})),
        AdapterMalformed,
        "",
    ),
    "a key that is hashed for years": (bin_is(tuple_key_bomb), AdapterMalformed, "a key that is a tuple"),
    "a hundred gigabytes asked for": (
        bin_is(bytearray_bomb),
        AdapterUnsupported,
        "it calls 'builtins.bytearray'",
    ),
    "10^5 entries in a .bin": (bin_is(many_entries), AdapterMalformed, "not a dense tensor"),
    "truncated .bin": (bin_is(lambda a: saved(a.tensors)[:-500]), AdapterMalformed, "truncated"),
    "zip bomb": (bin_is(zip_bomb), AdapterMalformed, "compressed"),
    ".bin of a list": (bin_is(lambda _: saved([1])), AdapterMalformed, "must hold a dict"),
    ".bin of numbers": (bin_is(lambda _: saved({"a": 1})), AdapterMalformed, "not a dense tensor"),
    ".bin of a sparse tensor": (
        bin_is(lambda _: saved({"a": torch.eye(3).to_sparse()})),
        AdapterUnsupported,
        "_get_layout",
    ),
    ".bin of a vast view": (
        bin_is(lambda _: saved({f"{Q0}.lora_A.weight": torch.ones(1).expand(1 << 20, 1 << 20)})),
        AdapterMalformed,
        "more values than its storage",
    ),
}
