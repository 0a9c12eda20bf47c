"""What lies in the folder: nothing, links out of it, special files, files of holes, code."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lorafleet.protocol.errors import AdapterMalformed, AdapterMissing, AdapterUnsupported
from tests.workers.adapters.bad_adapters.damage import EVIL_CODE, Q0, SECRET, Case, Damage, joined


def replaced_by(name: str, make: Callable[[Any], object]) -> Damage:
    def damage(a: Any) -> None:
        (a.path / name).unlink()
        make(a.path / name)

    return damage


def sparse_weights(path: Any) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 40)


def outside(a: Any) -> Path:
    """A file beside the adapter's folder that nobody may see."""
    path = Path(a.path.parent / "secret.json")
    path.write_text(json.dumps({"peft_type": "LORA", SECRET: SECRET}))
    return path


def linked(name: str, target: Callable[[Any], Path | str]) -> Damage:
    def damage(a: Any) -> None:
        (a.path / name).unlink()
        (a.path / name).symlink_to(target(a))

    return damage


def folder_is(make: Callable[[Any], object]) -> Damage:
    def damage(a: Any) -> None:
        shutil.rmtree(a.path)
        make(a)

    return damage


def socket_at(path: Path) -> None:
    """By a short name, since a socket's path may have 108 characters."""
    folder = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)


def holes(size: int) -> Damage:
    """A valid header over so many bytes that nobody ever wrote."""

    def damage(a: Any) -> None:
        entry = {"dtype": "F32", "shape": [size // 128, 32], "data_offsets": [0, size]}
        header = joined({f"{Q0}.lora_A.weight": entry})
        with open(a.path / "adapter_model.safetensors", "wb") as file:
            file.write(header)
            file.truncate(len(header) + size)

    return damage


CASES: dict[str, Case] = {
    "no folder": (lambda a: a.path.rename(a.path.parent / "gone"), AdapterMissing, "no folder"),
    "no config": (lambda a: (a.path / "adapter_config.json").unlink(), AdapterMissing, "adapter_config.json"),
    "no weights": (lambda a: (a.path / "adapter_model.safetensors").unlink(), AdapterMissing, "adapter_model"),
    "mlx file name": (
        lambda a: (a.path / "adapter_model.safetensors").rename(a.path / "adapters.safetensors"),
        AdapterUnsupported,
        "mlx",
    ),
    "weights are a folder": (replaced_by("adapter_model.safetensors", os.mkdir), AdapterMalformed, "regular file"),
    "weights are a FIFO": (replaced_by("adapter_model.safetensors", os.mkfifo), AdapterMalformed, "regular file"),
    "config is a FIFO": (replaced_by("adapter_config.json", os.mkfifo), AdapterMalformed, "regular file"),
    "config is a device": (
        replaced_by("adapter_config.json", lambda p: p.symlink_to("/dev/zero")),
        AdapterMalformed,
        "symlink",
    ),
    "config is a link to itself": (
        replaced_by("adapter_config.json", lambda p: p.symlink_to(p)),
        AdapterMissing,
        "adapter_config.json",
    ),
    "link out of the folder": (
        replaced_by("adapter_model.safetensors", lambda p: p.symlink_to("/etc/hostname")),
        AdapterMalformed,
        "symlink that leaves",
    ),
    "a terabyte of holes": (replaced_by("adapter_model.safetensors", sparse_weights), AdapterMalformed, "at most"),
    "14 GB of holes behind a header": (holes(14 << 30), AdapterMalformed, "without lora_B"),
    "the folder is a file": (folder_is(lambda a: a.path.write_text(SECRET)), AdapterMissing, "not a folder"),
    "the folder is a link to another": (
        folder_is(lambda a: a.path.symlink_to("/etc")),
        AdapterMissing,
        "has no adapter_config.json",
    ),
    "config leads to another file": (linked("adapter_config.json", outside), AdapterMalformed, "symlink that leaves"),
    "weights lead to another file": (
        linked("adapter_model.safetensors", outside),
        AdapterMalformed,
        "symlink that leaves",
    ),
    "weights lead up and down again": (
        linked("adapter_model.safetensors", lambda a: f"../{outside(a).name}"),
        AdapterMalformed,
        "symlink that leaves",
    ),
    "weights lead to a device": (
        linked("adapter_model.safetensors", lambda _: "/dev/random"),
        AdapterMalformed,
        "symlink that leaves",
    ),
    "weights lead to the process's memory": (
        linked("adapter_model.safetensors", lambda _: "/proc/self/mem"),
        AdapterMalformed,
        "symlink that leaves",
    ),
    "config is a folder": (replaced_by("adapter_config.json", os.mkdir), AdapterMalformed, "regular file"),
    "weights are a socket": (
        replaced_by("adapter_model.safetensors", socket_at),
        AdapterMalformed,
        "regular file",
    ),
    "config of a terabyte of holes": (replaced_by("adapter_config.json", sparse_weights), AdapterMalformed, "at most"),
    "code beside the config": (
        lambda a: (a.set(auto_map={"AutoModel": "evil.Model"}), (a.path / "evil.py").write_text(EVIL_CODE)),
        AdapterUnsupported,
        "'auto_map'",
    ),
}
