from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lorafleet.protocol.lora_config import LoRAConfig
from tests.cluster.harness import serving
from tests.cluster.last_tests import until_last_test
from tests.cluster.tenancy.house import House, running_engine
from tests.cluster.tenancy.tenants import REPLICAS, RUNNING, WAITING, Tenants, lorafleet


@pytest.fixture(scope="session")
def tenants_engine(fleet: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str]]:
    lora = LoRAConfig(max_loras=4, max_cpu_loras=8)
    with running_engine(fleet("llama3").base, tmp_path_factory.mktemp("ipc"), lora, kv_cache_tokens=4096) as made:
        yield made


@pytest.fixture
def house(tenants_engine: tuple[Any, str], fleet: Callable[[str], Any], tmp_path: Path) -> House:
    return House(tmp_path, *tenants_engine, fleet("llama3").base)


@pytest.fixture(scope="session")
def tenants(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tenants]:
    """Serves `base`, a0 and a1 on two replicas to the tenants acme, rival and crowd, with short queues.

    A test file that uses it sets `pytestmark = pytest.mark.xdist_group("tenants")`. test_two_tenants.py, the last one,
    counts all that acme asks, and kills the replicas.
    """
    folder = tmp_path_factory.mktemp("tenants")
    file, keys = folder / "keys.yaml", {}
    file.write_text("keys: []\ntenants: {rival: {limits: {requests_per_minute: 8}}}\n")
    for tenant in ("acme", "rival", "crowd"):
        keys[tenant] = lorafleet(
            *("keys", "create", str(file), "--id", tenant, "--tenant", tenant, "--scope", "infer", "--scope", "admin")
        )
    keys["scraper"] = lorafleet("keys", "create", str(file), "--id", "scraper", "--scope", "metrics")
    arguments = ["--model", str(tiny_model), "--served-model-name", "base", "--num-replicas", str(REPLICAS)]
    arguments += ["--lora-modules", f"a0={tiny_model.parent / 'a0'}", f"a1={tiny_model.parent / 'a1'}"]
    arguments += ["--kv-cache-tokens", "4096", "--max-num-seqs", str(RUNNING), "--max-queued-requests", str(WAITING)]
    arguments += ["--queue-timeout", "300", "--api-keys", str(file), "--usage-dir", str(folder / "usage")]
    with until_last_test(request) as stack:
        yield Tenants(stack.enter_context(serving(arguments, folder / "serve.log")), folder, keys)
