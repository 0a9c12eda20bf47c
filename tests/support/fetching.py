"""Provides a store that fetches from S3 as a node's processes do, and functions that tests run in other processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

from lorafleet.protocol.sources import S3Config, SourcesConfig
from lorafleet.resolvers.deadline import FetchDeadline
from lorafleet.resolvers.s3 import S3Source
from lorafleet.resolvers.source import RemoteFile
from lorafleet.resolvers.store import AdapterStore


def make_store(cache: Path, endpoint: str, cache_bytes: int = 1 << 30, **fields: Any) -> AdapterStore:
    s3 = S3Config(endpoint_url=endpoint, region="us-east-1", **fields)
    return AdapterStore(SourcesConfig(s3=s3, cache_dir=str(cache), cache_bytes=cache_bytes))


def fetch_elsewhere(cache: str, endpoint: str, uri: str, results: Any) -> None:
    results.put(make_store(Path(cache), endpoint).fetch(uri))


class Dying(S3Source):
    def read(self, file: RemoteFile, start: int, end: int, deadline: FetchDeadline) -> Generator[bytes, None, None]:
        if file.name == "adapter_model.safetensors" and start > 0:
            os.kill(os.getpid(), signal.SIGKILL)
        yield from super().read(file, start, end, deadline)


def die_fetching(cache: str, endpoint: str, uri: str) -> None:
    store = make_store(Path(cache), endpoint)
    store._sources["s3"] = Dying(S3Config(endpoint_url=endpoint, region="us-east-1"))
    store.fetch(uri)
