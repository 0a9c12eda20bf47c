"""This package administers a running server: the operations on adapters, and the HTTP and Python interfaces to them."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

_MOVED = ("get_directory", "DirectoryHandle")  # These have moved to admin_handle.


def __getattr__(name: str) -> Any:
    """Returns a name that has moved to another module, with a DeprecationWarning."""
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    new_path = f"{__name__}.admin_handle"
    warnings.warn(
        f"{__name__}.{name} is {new_path}.{name} now; the old path will be removed in the next release.",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(importlib.import_module(new_path), name)
