"""Creates an output folder that appears complete or not at all. It never overwrites anything."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lorafleet.protocol.errors import ConfigError


def check_new(path: Path) -> None:
    """Raises ConfigError if `path` exists and is not an empty folder, or could not be created."""
    if os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())):
        raise ConfigError(f"{path} already exists; name a folder that does not exist, or remove it.")
    parent = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{path} cannot be created: {parent} is not a folder that can be written to. Name another.")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yields a draft folder next to `path`, and renames it to `path` if the block succeeds. Raises ConfigError if
    `path` exists and is not an empty folder, or cannot be created."""
    check_new(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        draft.chmod(0o755)
    except OSError as error:
        raise ConfigError(f"{path} cannot be created: {error.strerror}.") from error
    try:
        yield draft
        for entry in draft.rglob("*"):
            entry.chmod(0o755 if entry.is_dir() else 0o644)  # safetensors writes files that only their owner can read
        draft.rename(path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
