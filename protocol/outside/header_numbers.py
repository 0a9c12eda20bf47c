"""Reads numbers from headers, which may hold any text."""

from __future__ import annotations

MAX_DIGITS = 18  # A number with more digits stands for no size or time, and Python refuses to read thousands of them.


def header_number(text: str) -> int | None:
    """Returns the number that a header holds in decimal digits, or None if it holds something else."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS else None
