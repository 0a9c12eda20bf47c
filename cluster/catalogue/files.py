"""An adapter's files on their way into the store: copied whole, with the digest that the workers will compute."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from lorafleet.workers.lora.files import (
    CHUNK_BYTES,
    CONFIG_NAME,
    SAFETENSORS_NAME,
    AdapterFolder,
    OpenFile,
    new_digest,
    open_weights,
    read_config,
)


def folder_digest(path: Path) -> str:
    """As workers/lora/model.py computes it. Raises AdapterError."""
    folder = AdapterFolder.at(path)
    config = read_config(folder)
    with open_weights(folder) as weights:
        return _read_through(config, weights, None)


def stage(path: Path, target: Path) -> str:
    """Copies config and weights, nothing else, into a folder that exists; returns the digest. Raises AdapterError."""
    folder = AdapterFolder.at(path)
    config = read_config(folder)
    with open_weights(folder) as weights:
        digest = _read_through(config, weights, target / weights.name)
        weights.check_unchanged()
    (target / CONFIG_NAME).write_bytes(config)
    return digest


def stage_tensors(tensors: bytes, config: dict[str, object], target: Path) -> str:
    """tensors: of a safetensors file."""
    (target / CONFIG_NAME).write_text(json.dumps(config, sort_keys=True))
    (target / SAFETENSORS_NAME).write_bytes(tensors)
    return folder_digest(target)


def _read_through(config: bytes, weights: OpenFile, copy_to: Path | None) -> str:
    digest: hashlib._Hash = new_digest(config, weights)
    buffer = memoryview(bytearray(CHUNK_BYTES))
    copy = copy_to.open("wb") if copy_to is not None else None
    try:
        for start in range(0, weights.size, CHUNK_BYTES):
            chunk = buffer[: min(CHUNK_BYTES, weights.size - start)]
            weights.read_into(chunk, digest)
            if copy is not None:
                copy.write(chunk)
    finally:
        if copy is not None:
            copy.close()
    return digest.hexdigest()
