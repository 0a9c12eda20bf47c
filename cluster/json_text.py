"""Recognizes and parses options whose values are JSON."""

from __future__ import annotations

import json
from typing import Any


def is_json(text: str) -> bool:
    return text.lstrip().startswith("{")


def parse_json(text: str) -> Any:
    """Raises ValueError, which quotes the text."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not valid JSON: {error}") from None
