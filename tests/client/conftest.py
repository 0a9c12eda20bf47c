"""Provides a replica without Ray for the clients to administer, and two adapters of its model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import real_server


@dataclass(frozen=True, slots=True)
class Served:
    """A running server, and two folders of adapters that are not registered."""

    url: str
    one: Path
    other: Path
    seed: Callable[[str, Path], None]  # Registers an adapter as `--lora-modules` does.


@pytest.fixture(scope="module")
def served(fleet: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = fleet("llama3")
    folder = tmp_path_factory.mktemp("client")
    config: dict[str, Any] = {"allow_runtime_lora_updating": False}
    with real_server.running(folder, made.base, {}, config, max_model_len=48, kv_cache_tokens=1024) as server:
        yield Served(server.url, made.adapters["all"], made.adapters["qv"], server.seed)
