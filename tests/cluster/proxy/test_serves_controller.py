"""What Serve's own class of an application's state knows of its ingress while a version is built, or after deletion."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.cluster.checking import ray_schemas  # noqa: F401  # before its module can warn

pytestmark = pytest.mark.filterwarnings("ignore")  # Those of Serve, when it is imported.
REPLICAS = SimpleNamespace(ingress=True, ingress_request_router=False, route_prefix="/")
ROUTER = SimpleNamespace(ingress=False, ingress_request_router=True, route_prefix=None)
INFOS = {"EngineReplica": REPLICAS, "AdapterRouter": ROUTER}


@pytest.fixture
def application(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An application's state in a controller that lorafleet has changed, whose deployments run."""
    from ray.serve._private import application_state as serves

    from lorafleet.cluster.proxy.serves_controller import keep_ingress

    monkeypatch.setattr(serves.ApplicationState, "_set_target_state", serves.ApplicationState._set_target_state)
    keep_ingress()
    deployments = Mock()
    deployments.get_deployments_in_application.return_value = list(INFOS)
    deployments.get_deployment.side_effect = lambda deployment: INFOS[deployment.name]
    return serves.ApplicationState("lorafleet", deployments, Mock(), Mock(), Mock(), False)


def known(application: Any) -> tuple[str | None, str | None]:
    return application.ingress_deployment, application.ingress_request_router_deployment


def checkpoint(infos: dict[str, Any] | None) -> Any:
    from ray.serve._private.application_state import ApplicationTargetState
    from ray.serve.schema import APIType

    return ApplicationTargetState(infos, None, None, None, None, False, APIType.DECLARATIVE, None, False)


def test_an_application_keeps_its_ingress_while_its_next_version_is_built(application: Any) -> None:
    application.recover_target_state_from_checkpoint(checkpoint(INFOS))
    assert known(application) == ("EngineReplica", "AdapterRouter")
    application._clear_target_state_and_store_config(None)
    assert known(application) == ("EngineReplica", "AdapterRouter")
    assert application.target_deployments == []


def test_so_does_one_that_a_new_controller_finds_without_a_version_that_could_be_built(application: Any) -> None:
    application.recover_target_state_from_checkpoint(checkpoint(None))
    assert known(application) == ("EngineReplica", "AdapterRouter")
    assert application.route_prefix == "/"


def test_an_application_that_is_deleted_has_no_ingress(application: Any) -> None:
    application._clear_target_state_and_store_config(None)
    application.delete()
    assert known(application) == (None, None)
