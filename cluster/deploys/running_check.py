"""Asks running replicas whether they could take a deploy's options, before Ray Serve is given the deploy.

A deploy that fails here changes nothing, and `serve status` says why. Later Serve would stop replicas instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from ray import serve
from ray.serve.exceptions import RayServeException

from lorafleet.cluster.config import AppArgs
from lorafleet.cluster.proxy import ingress
from lorafleet.protocol.errors import ConfigError

CHECK_S = 900.0  # Time for loading all adapters that are new.
REPLICAS = "EngineReplica"


@dataclass(frozen=True, slots=True)
class ProposedDeploy:
    version: str  # Of what its replicas are built from. Only replicas with the same version would take the options.
    args: AppArgs


def check_running(args: AppArgs, version: str) -> None:
    """Raises ConfigError with the reason of a running replica that could not take the options. Replicas of other
    applications have other versions, or serve the same model from the same files, so they answer just as well."""
    proposed = ProposedDeploy(version, args)
    for application in ingress.running_applications(REPLICAS):
        handle = serve.get_deployment_handle(REPLICAS, application)
        try:
            answers = handle.broadcast("check_deploy", proposed).results(timeout_s=CHECK_S, return_exceptions=True)
        except (RayServeException, TimeoutError):  # The replicas end, or are stopped: Serve replaces them.
            continue
        refused = next((answer for answer in answers if isinstance(answer, str)), None)
        if refused is not None:
            raise ConfigError(f"{refused} Nothing was changed.")
