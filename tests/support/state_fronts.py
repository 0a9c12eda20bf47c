"""A front without an engine's process, for routes that only look: real metrics and a real gate, no tokenizer."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any, cast

from lorafleet.workers.messages import EngineStats
from lorafleet.workers.openai.caller import Caller
from lorafleet.workers.openai.front import Front, FrontConfig
from lorafleet.workers.openai.gate import Gate, KnownKey
from lorafleet.workers.openai.metrics import Metrics
from lorafleet.workers.openai.recent import RecentFailures, RecentTraffic
from lorafleet.workers.openai.visibility import CallersCatalog, NoTenants

ADMIN_KEY = "the admin key"


def bare_front(keys: dict[str, Caller] | None = None, replica: str = "r0", stats: EngineStats | None = None) -> Front:
    """keys: None for a server without; the admin key is always one."""
    known = None if keys is None else {_digest(key): KnownKey(caller) for key, caller in keys.items()}
    gate = Gate(ADMIN_KEY, None if known is None else lambda: known)
    present = stats or EngineStats()
    front = cast(
        Front,
        SimpleNamespace(
            tenants=NoTenants(),
            config=FrontConfig(("base",), "/models/base", replica_id=replica),
            gate=gate,
            quotas=None,
            engine=SimpleNamespace(stats=present),
            metrics=Metrics(lambda: present, "base", replica),
            recent=RecentTraffic(),
            failures=RecentFailures(replica),
        ),
    )
    cast(Any, front).catalog_of = lambda caller: CallersCatalog(cast(Any, None), front.tenants, caller)
    return front


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
