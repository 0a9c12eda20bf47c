"""A good file's value with one place changed."""

from __future__ import annotations

import copy
from typing import Any


def with_value(good: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(good)
    inside: Any = changed
    for part in place[:-1]:
        inside = inside[part]
    inside[place[-1]] = value
    return changed
