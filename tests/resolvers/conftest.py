"""Provides adapters as bytes, and stores for them. Nothing here reads weights, so any bytes are weights."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lorafleet.protocol.adapter_formats.adapter_files import stored_files
from stores import stop_all

Files = dict[str, bytes]


@pytest.fixture(scope="session")
def make_files() -> Callable[..., Files]:
    """Returns a function that makes the files of an adapter, always the same for a seed."""

    def make(seed: int = 0, num_bytes: int = 1000, base: str | None = None) -> Files:
        return {
            "adapter_config.json": json.dumps({"r": seed, "base_model_name_or_path": base}).encode(),
            "adapter_model.safetensors": random.Random(seed).randbytes(num_bytes),
        }

    return make


@pytest.fixture(scope="session")
def read_files() -> Callable[[Path], Files]:
    def read(folder: Path) -> Files:
        return {name: file.read_bytes() for name, file in stored_files(folder).items()}

    return read


@pytest.fixture(autouse=True)
def stop_stores() -> Iterator[None]:
    yield
    stop_all()
