"""How a sound adapter is damaged: what the tables of this folder share."""

from __future__ import annotations

import io
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lorafleet.protocol.errors import AdapterError

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
CANARY = Path("/tmp/lorafleet-evil")  # is there once an adapter's code has run
SECRET = "the-secret-of-another-file"
SLOW_REGEX = r"(?:a|.|..|...)*Z?(?<!oj)"
EVIL_CODE = f"import os\nos.system('touch {CANARY}')\n"
Damage = Callable[[Any], object]
Case = tuple[Damage, type[AdapterError], str]  # the error's class, and words of it


def config_has(**changes: object) -> Damage:
    return lambda a: a.set(**changes)


def weights_are(change: Callable[[bytes], bytes]) -> Damage:
    def damage(a: Any) -> None:
        path = a.path / "adapter_model.safetensors"
        path.write_bytes(change(path.read_bytes()))

    return damage


def parted(data: bytes) -> tuple[dict[str, Any], bytes]:
    """A safetensors file's header, and what is behind it."""
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def joined(header: dict[str, Any] | bytes, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


class Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {CANARY}",)


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
