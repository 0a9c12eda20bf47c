"""Copies an adapter's files on their way into the store, and computes the digest that the workers will compute."""

from __future__ import annotations

import os
from pathlib import Path

from lorafleet.protocol.adapter_formats.adapter_files import (
    CONFIG_NAME,
    AdapterFolder,
    check_same_config,
    open_weights,
    read_config,
    read_optional,
    read_through,
)
from lorafleet.protocol.adapter_formats.draft_files import check_draft


def stage(path: str | os.PathLike[str], target: Path) -> str:
    """Copies config, weights, tokenizer files and a draft LoRA, and nothing else, into an existing folder.

    Returns their digest. Raises AdapterError, for a draft whose header is wrong before anything is read whole.
    """
    folder = AdapterFolder.at(path)
    check_draft(folder)
    config, optional = read_config(folder), read_optional(folder)
    with open_weights(folder) as weights, (target / weights.name).open("wb") as copy:
        digest = read_through(config, optional, weights, copy)
        weights.check_unchanged()
    check_same_config(folder, config)
    for name, content in {CONFIG_NAME: config, **optional}.items():
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_bytes(content)
    return digest
