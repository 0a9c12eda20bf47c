from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lorafleet.protocol.lora_config import LoRAConfig
from tests.cluster.tenancy.house import House, running_engine


@pytest.fixture(scope="session")
def tenants_engine(fleet: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str]]:
    lora = LoRAConfig(max_loras=4, max_cpu_loras=8)
    with running_engine(fleet("llama3").base, tmp_path_factory.mktemp("ipc"), lora, kv_cache_tokens=4096) as made:
        yield made


@pytest.fixture
def house(tenants_engine: tuple[Any, str], fleet: Callable[[str], Any], tmp_path: Path) -> House:
    return House(tmp_path, *tenants_engine, fleet("llama3").base)
