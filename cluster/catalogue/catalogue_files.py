"""Copies an adapter's files on their way into the store, and computes the digest that the workers will compute.

No file but the config is ever in memory as a whole.
"""

from __future__ import annotations

import os
from pathlib import Path

from lorafleet.protocol.adapter_formats.adapter_files import (
    CONFIG_NAME,
    AdapterFolder,
    check_same_config,
    open_weights,
    opened_optional,
    read_config,
    read_through,
)


def stage(path: str | os.PathLike[str], target: Path) -> str:
    """Copies config, weights, tokenizer files and a draft LoRA, and nothing else, into an existing folder.

    Returns their digest. Raises AdapterError.
    """
    folder = AdapterFolder.at(path)
    config = read_config(folder)
    with open_weights(folder) as weights, opened_optional(folder) as optional:
        digest = read_through(config, optional, weights, target)
        weights.check_unchanged()
    check_same_config(folder, config)
    (target / CONFIG_NAME).write_bytes(config)
    return digest
