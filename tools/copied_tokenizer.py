"""Copies the files of a tokenizer from a model's or an adapter's folder. They are copied as data: no code in them
runs."""

from __future__ import annotations

import hashlib
from pathlib import Path

from lorafleet.protocol.adapter_formats.adapter_files import AdapterFolder

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
MAX_BYTES = 256 << 20


def tokenizer_files(folder: Path) -> list[str]:
    """Returns the names of the tokenizer files that the folder has."""
    return [name for name in TOKENIZER_FILES if AdapterFolder.at(folder).has(name)]


def copy_file(source: Path, target: Path, name: str, max_bytes: int = MAX_BYTES) -> None:
    """Copies one file of a folder. `name` may lead into a sub-folder, which is created. Raises AdapterMalformed if it
    is not a regular file there, or has more than `max_bytes`."""
    with AdapterFolder.at(source).open(name, max_bytes) as file:
        data = bytearray(file.size)
        file.read_into(memoryview(data), hashlib.sha256())
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_bytes(data)
