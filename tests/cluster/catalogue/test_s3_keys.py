"""The store in S3 without a server: keys that others wrote into the bucket are left alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lorafleet.cluster.catalogue.s3_store import S3Store


class Bucket:
    """A boto3 client of one bucket, by key."""

    def __init__(self, contents: dict[str, bytes]) -> None:
        self._contents = contents

    def get_paginator(self, _operation: str) -> Bucket:
        return self

    def paginate(self, **place: str) -> Iterator[dict[str, Any]]:
        found = {key: content for key, content in self._contents.items() if key.startswith(place["Prefix"])}
        yield {"Contents": [{"Key": key, "Size": len(content)} for key, content in found.items()]}

    def download_file(self, _bucket: str, key: str, path: str) -> None:
        Path(path).write_bytes(self._contents[key])


@pytest.mark.parametrize("name", ["../stray", "draft/../../stray", "/{}/stray", "notes/of/mine", "readme.md"])
def test_only_the_files_of_an_adapter_are_fetched(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"1", "draft/adapter_config.json": b"{}"}
    contents = {f"store/adapters/d/{key}": value for key, value in (files | {name.format(tmp_path): b"x"}).items()}
    S3Store("s3://bucket/store", lambda: Bucket(contents)).fetch_files("d", folder)
    found = {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    assert found == files
    assert not list(tmp_path.rglob("stray"))
