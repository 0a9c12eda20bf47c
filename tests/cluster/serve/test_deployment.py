"""What Serve is told about replicas, without starting any."""

from __future__ import annotations

from pathlib import Path

import pytest

from lorafleet.cluster.config import parse_args


@pytest.mark.filterwarnings("ignore")  # Those of Serve, when it is imported.
@pytest.mark.parametrize(("given", "drain_s"), [({}, 300.0), ({"drain_timeout": 1200}, 1200.0)])
def test_a_stopped_replica_has_time_for_long_answers(
    given: dict[str, object], drain_s: float, tiny_model: Path
) -> None:
    from lorafleet.cluster.serve.app import replicas

    args = parse_args({"model": str(tiny_model), "device": "cpu"} | given)
    deployment = replicas(args, args.engine_config())
    assert deployment._deployment_config.graceful_shutdown_timeout_s == drain_s


@pytest.mark.filterwarnings("ignore")  # As above.
def test_answers_begun_while_a_stopped_replica_still_takes_connections_have_the_time_too(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.serve._private import constants

    from lorafleet.cluster.serve.app import replicas

    monkeypatch.setattr(constants, "RAY_SERVE_ENABLE_HA_PROXY", True)
    monkeypatch.setattr(constants, "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", 5.0)
    args = parse_args({"model": str(tiny_model), "device": "cpu", "drain_timeout": 2})
    deployment = replicas(args, args.engine_config())
    assert deployment._deployment_config.graceful_shutdown_timeout_s == 5.0 + 2.0
