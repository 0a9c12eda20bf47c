"""Checks the options that say where a store is, before any process starts."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator


def _check(uri: str) -> str:
    if "://" in uri and not uri.startswith("s3://"):
        raise ValueError(f"{uri!r} is neither a folder nor s3://bucket/prefix; give one of the two")
    return uri


StoreUri = Annotated[str, AfterValidator(_check)]  # A folder, or s3://bucket/prefix.
