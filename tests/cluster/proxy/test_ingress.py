"""A replica's answers to HAProxy's health checks, while it runs and after it has been told to stop."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.filterwarnings("ignore")  # Those of Serve, when it is imported.


@pytest.mark.parametrize(
    ("is_well", "is_healthy", "shuts_down", "passes"),
    [
        (True, True, False, True),
        (True, True, True, True),
        (True, False, False, False),
        (True, False, True, False),
        (False, True, False, False),
        (False, True, True, False),
    ],
)
def test_a_replica_that_is_stopped_passes_checks_while_it_takes_connections(
    monkeypatch: pytest.MonkeyPatch, is_well: bool, is_healthy: bool, shuts_down: bool, passes: bool
) -> None:
    from ray.serve._private import replica

    from lorafleet.cluster.proxy import ingress

    check: Any = replica.Replica._dataplane_health_check
    monkeypatch.setattr(replica.Replica, "_dataplane_health_check", check)  # It is restored at the end.
    ingress.answer_health_checks(lambda: is_well)
    checked: Any = SimpleNamespace(_shutting_down=shuts_down, _healthy=is_healthy)
    assert asyncio.run(replica.Replica._dataplane_health_check(checked))[0] is passes
