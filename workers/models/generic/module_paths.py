"""Converts transformers' paths of modules to the engine's names."""

from __future__ import annotations

ROOT = "model."  # most architectures' name for the decoder below the head, which engine names leave out


def engine_path(path: str) -> str:
    """Returns the engine's name for a module of the checkpoint, which transformers names `path`."""
    return path.removeprefix(ROOT)
