"""Tells the content of a file of API keys from its path. It is separate from the reader of the file, so that parsing
options imports little."""

from __future__ import annotations


def is_key_text(source: str) -> bool:
    """Returns whether this is the content of a file of keys, not a path."""
    return source.lstrip().startswith(("{", "keys:", "tenants:"))
