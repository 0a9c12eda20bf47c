"""Gives a Serve deployment a version of its own. Ray Serve 2.60 gives all deployments of a file one version, a hash of
all of its `args`, and so replaces every replica for any change of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import PrivateAttr
from ray.serve import Deployment
from ray.serve._private.config import DeploymentConfig


@dataclass(frozen=True, slots=True)
class Deployed:
    """The identity of the deploy that a replica was started by."""

    version: str  # Of what they are built from. Deploys that replace no replica have the same one.
    instance: str  # Of Ray Serve. It is the same until Serve is shut down, however often the application is deployed.


class VersionedConfig(DeploymentConfig):
    """A deployment's configuration that reaches Serve's controller with its own version, whatever Serve sets."""

    _own_version: str = PrivateAttr("")

    def to_proto(self) -> Any:
        self.version = self._own_version
        return super().to_proto()  # type: ignore[no-untyped-call]  # Ray's own omission


def with_version(deployment: Deployment, version: str) -> Deployment:
    """Returns the deployment, whose replicas Serve replaces only when `version` changes."""
    plain = deployment._deployment_config
    config = VersionedConfig.model_construct(**{name: getattr(plain, name) for name in type(plain).model_fields})
    config._own_version = version
    deployment._deployment_config = config
    return deployment
