"""Packs an adapter's folder into a tar for an upload: only the files that serving reads."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import IO

from lorafleet.protocol.adapter_formats.adapter_files import BIN_NAME, CONFIG_NAME, OPTIONAL_NAMES, SAFETENSORS_NAME


def pack(folder: Path, packed: IO[bytes]) -> int:
    """Writes the tar and returns its number of bytes; the file is then at its beginning. Raises FileNotFoundError."""
    weights = next((name for name in (SAFETENSORS_NAME, BIN_NAME) if (folder / name).exists()), None)
    if weights is None or not (folder / CONFIG_NAME).exists():
        raise FileNotFoundError(
            f"{folder} is not an adapter: it needs {CONFIG_NAME} and {SAFETENSORS_NAME} (or {BIN_NAME})."
        )
    optional = [name for name in OPTIONAL_NAMES if (folder / name).exists()]
    with tarfile.open(fileobj=packed, mode="w:", format=tarfile.PAX_FORMAT) as tar:
        for name in (CONFIG_NAME, weights, *optional):
            tar.add((folder / name).resolve(), arcname=name)
    num_bytes = packed.tell()
    packed.seek(0)
    return num_bytes
