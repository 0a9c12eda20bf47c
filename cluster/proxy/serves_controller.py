"""Changes Ray Serve's controller where it would stop requests to an application that still runs.

While Serve builds an application from a changed file, and after a build that has failed, it does not know which
deployments the application will have. It then forgets also which deployment of the running application takes requests
(ApplicationState._set_target_state with deployment_infos=None, in ray/serve/_private/application_state.py), and tells
every HAProxy that the application has no replica (ServeController._get_target_groups_for_app, in controller.py). Here,
the deployments that run answer for the application until others are known. An application that is deleted has no
deployments, so it is not concerned.
"""

from __future__ import annotations

from typing import Any

from ray.serve._private.application_state import ApplicationState
from ray.serve._private.common import DeploymentID

_set_target_state = ApplicationState._set_target_state


def keep_ingress() -> None:
    """Call this in the controller's process before it has applications."""
    ApplicationState._set_target_state = _set_target_state_and_keep_ingress  # type: ignore[method-assign]


def _set_target_state_and_keep_ingress(self: Any, deployment_infos: dict[str, Any] | None, **others: Any) -> None:
    _set_target_state(self, deployment_infos, **others)
    if deployment_infos is not None:
        return
    manager = self._deployment_state_manager
    for name in manager.get_deployments_in_application(self._name):
        info = manager.get_deployment(DeploymentID(name, self._name))
        if info is not None and info.ingress:
            self._ingress_deployment_name = name
            self._route_prefix = info.route_prefix  # A controller that was started anew does not know it.
        if info is not None and info.ingress_request_router:
            self._ingress_request_router_deployment_name = name
