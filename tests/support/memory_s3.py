"""Implements boto3's S3 client over a dictionary, as far as the catalogue's store uses the protocol.

It always obeys, and a test can make it lose answers. The real server of s3_server.py is not available everywhere.
"""

# ruff: noqa: ARG002  (The protocol names the arguments.)

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from botocore.exceptions import ClientError, ReadTimeoutError


class MemoryS3:
    """Stores objects in memory, and calls `fault` before and after each operation, which may raise."""

    def __init__(self, fault: Callable[[], None] = lambda: None) -> None:
        self.objects: dict[str, tuple[bytes, dict[str, str]]] = {}
        self.fault = fault

    def put_object(self, *, Bucket: str, Key: str, Body: bytes, IfNoneMatch: str | None = None) -> None:
        self.fault()
        if IfNoneMatch and Key in self.objects:
            raise _error("PreconditionFailed", 412)
        self.objects[Key] = Body, {}
        self.fault()

    def get_object(self, *, Bucket: str, Key: str) -> dict[str, Any]:
        self.fault()
        return {"Body": io.BytesIO(self._found(Key)[0])}

    def head_object(self, *, Bucket: str, Key: str) -> dict[str, Any]:
        self.fault()
        return {"Metadata": self._found(Key)[1]}

    def delete_object(self, *, Bucket: str, Key: str) -> None:
        self.fault()
        self.objects.pop(Key, None)
        self.fault()

    def upload_file(self, path: str, Bucket: str, Key: str, ExtraArgs: dict[str, Any]) -> None:
        self.fault()
        self.objects[Key] = Path(path).read_bytes(), ExtraArgs.get("Metadata", {})
        self.fault()

    def upload_fileobj(self, file: BinaryIO, Bucket: str, Key: str, ExtraArgs: dict[str, Any]) -> None:
        self.fault()
        self.objects[Key] = file.read(), ExtraArgs.get("Metadata", {})
        self.fault()

    def download_file(self, bucket: str, key: str, path: str) -> None:
        self.fault()
        Path(path).write_bytes(self._found(key)[0])

    def get_paginator(self, _: str) -> MemoryS3:
        return self

    def paginate(self, *, Bucket: str, Prefix: str, Delimiter: str = "") -> Iterator[dict[str, Any]]:
        self.fault()
        keys = sorted(key for key in self.objects if key.startswith(Prefix))
        folders = sorted({key[: key.index("/", len(Prefix)) + 1] for key in keys if "/" in key[len(Prefix) :]})
        yield {"CommonPrefixes": [{"Prefix": folder} for folder in folders]} if Delimiter else {}
        for key in [] if Delimiter else keys:
            yield {"Contents": [{"Key": key, "Size": len(self.objects[key][0])}]}

    def _found(self, key: str) -> tuple[bytes, dict[str, str]]:
        if key not in self.objects:
            raise _error("NoSuchKey", 404)
        return self.objects[key]


def lost_answer() -> ReadTimeoutError:
    return ReadTimeoutError(endpoint_url="http://s3.invalid")


def _error(code: str, status: int) -> ClientError:
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "S3")
