"""The files of a tokenizer that lies beside a model or in an adapter's folder, copied as data: nothing of them runs."""

from __future__ import annotations

import hashlib
from pathlib import Path

from lorafleet.protocol.adapter_files import AdapterFolder

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
    """Those that are there."""
    return [name for name in TOKENIZER_FILES if AdapterFolder.at(folder).has(name)]


def copy_file(source: Path, target: Path, name: str) -> None:
    """Raises AdapterMalformed for what is no regular file of that folder, or too large."""
    with AdapterFolder.at(source).open(name, MAX_BYTES) as file:
        data = bytearray(file.size)
        file.read_into(memoryview(data), hashlib.sha256())
        (target / name).write_bytes(data)
