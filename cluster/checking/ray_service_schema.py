"""Makes the schema of a RayService, ray.io/v1, as far as lorafleet reads it. KubeRay's custom resource definition has
more keys, which differ by its version: `kubectl apply --dry-run=server --validate=strict` checks those.

Pod templates have Kubernetes' own schema, from the package kubernetes-validate, if that is installed.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from lorafleet.cluster.checking.keys import Schema

_TEMPLATE = "io.k8s.api.core.v1.PodTemplateSpec"
_NUMBER, _TEXT = {"type": "integer"}, {"type": "string"}


def knows_pods() -> bool:
    return importlib.util.find_spec("kubernetes_validate") is not None


def unchecked() -> str:
    """Returns in words what the schema leaves to a server of Kubernetes."""
    return "KubeRay's own keys" if knows_pods() else "pods (install lorafleet[kubernetes]) and KubeRay's own keys"


def ray_service_schema() -> Schema:
    if knows_pods():
        definitions = _kubernetes()
    else:
        definitions = {_TEMPLATE: _open({}, {"spec": _open({"containers": _list(_open({"name": _TEXT}))})})}
    group = {"rayStartParams": {"type": "object"}, "template": {"$ref": f"#/$defs/{_TEMPLATE}"}}
    workers = {"groupName": _TEXT, "minReplicas": _NUMBER, "maxReplicas": _NUMBER}
    optional: dict[str, Schema] = {
        "workerGroupSpecs": _list(_open(group | workers, {"replicas": _NUMBER, "numOfHosts": _NUMBER})),
        "enableInTreeAutoscaling": {"type": "boolean"},
        "authOptions": {"type": "object"},
    }
    cluster = _open({"headGroupSpec": _open(group)}, optional)
    keys: dict[str, Schema] = {
        "apiVersion": {"enum": ["ray.io/v1"]},
        "kind": {"enum": ["RayService"]},
        "metadata": {"type": "object"},
        "spec": _open({"rayClusterConfig": cluster}, {"serveConfigV2": _TEXT}),
    }
    return {**_open(keys), "$defs": definitions}


def _open(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """Returns the schema of an object that must have the keys of `required`, and may have any other."""
    properties = required | (optional or {})
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": True}


def _list(of: Schema) -> Schema:
    return {"type": "array", "items": of}


def _kubernetes() -> dict[str, Schema]:
    """Returns the definitions of the newest Kubernetes that the package describes."""
    import kubernetes_validate
    from kubernetes_validate.utils import latest_version

    folder = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / f"v{latest_version()}-local-strict"
    definitions: dict[str, Schema] = json.loads((folder / "_definitions.json").read_text())["$defs"]
    return definitions
