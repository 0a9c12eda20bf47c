"""Checks a KubeRay RayService, and the Serve configuration inside it. serve_file.py checks the latter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lorafleet.cluster.checking.keys import check_keys, check_values
from lorafleet.cluster.checking.nodes import Cluster, NodeGroup, check_fit
from lorafleet.cluster.checking.ray_service_schema import ray_service_schema
from lorafleet.cluster.checking.ray_up_file import missing_environment
from lorafleet.cluster.checking.serve_file import Serving, check_serve
from lorafleet.cluster.checking.yaml_source import Place, Problem, YamlSource
from lorafleet.cluster.wording import nearest
from lorafleet.protocol.errors import ConfigError

GPU = "nvidia.com/gpu"
CLUSTER: Place = ("spec", "rayClusterConfig")
SERVED: Place = ("spec", "serveConfigV2")


def check_ray_service(source: YamlSource) -> tuple[list[Problem], Serving | None, Cluster | None]:
    schema = ray_service_schema()
    problems = check_keys(source, (), source.value, schema) + check_values(source, (), source.value, schema)
    if problems:
        found, serving = _check_served(source, None)
        return problems + found, serving, None
    config = source.value["spec"]["rayClusterConfig"]
    for place, group in _groups(config):
        problems += _check_group(source, place, group)
    if (config.get("authOptions") or {}).get("mode") != "token":
        message = "authOptions.mode is not token, so anyone who can reach Ray's ports could run code. Set it to token."
        problems.append(source.problem((*CLUSTER, "authOptions"), message))
    cluster = _cluster(config)
    found, serving = _check_served(source, cluster)
    return problems + found, serving, cluster


def _groups(config: dict[str, Any]) -> Iterator[tuple[Place, dict[str, Any]]]:
    yield (*CLUSTER, "headGroupSpec"), config["headGroupSpec"]
    for number, group in enumerate(config.get("workerGroupSpecs") or []):
        yield (*CLUSTER, "workerGroupSpecs", number), group


def _check_group(source: YamlSource, place: Place, group: dict[str, Any]) -> list[Problem]:
    container: Place = (*place, "template", "spec", "containers", 0)
    pod = (group["template"].get("spec") or {}).get("containers") or []
    if not pod:
        return [source.problem((*place, "template"), "there is no container.")]
    given = {variable["name"]: variable.get("value") for variable in pod[0].get("env") or []}
    messages = missing_environment(given, "in this container")
    problems = [source.problem((*container, "env"), message) for message in messages]
    volumes = [volume["name"] for volume in group["template"]["spec"].get("volumes") or []]
    for number, mount in enumerate(pod[0].get("volumeMounts") or []):
        if mount["name"] not in volumes:
            message = f"there is no volume {mount['name']!r}{nearest(mount['name'], volumes)}"
            problems.append(source.problem((*container, "volumeMounts", number, "name"), message))
    least, most = group.get("minReplicas", 0), group.get("maxReplicas", 0)
    if not least <= group.get("replicas", least) <= most:
        message = f"replicas={group.get('replicas', least)} is not between minReplicas={least} and maxReplicas={most}."
        problems.append(source.problem((*place, "replicas"), message))
    return problems


def _cluster(config: dict[str, Any]) -> Cluster:
    head = config["headGroupSpec"]
    groups = [NodeGroup("head", True, 1, 1, *_resources(head))]
    for group in config.get("workerGroupSpecs") or []:
        hosts = group.get("numOfHosts", 1)
        least, most = group["minReplicas"], group["maxReplicas"]
        if not config.get("enableInTreeAutoscaling"):  # The operator runs exactly this many.
            least = most = group.get("replicas", least)
        groups.append(NodeGroup(group["groupName"], False, least * hosts, most * hosts, *_resources(group)))
    return Cluster(tuple(groups))


def _resources(group: dict[str, Any]) -> tuple[float | None, int]:
    """Returns the CPUs and GPUs that Ray counts on a pod: rayStartParams if given, else the container's resources."""
    parameters = group.get("rayStartParams") or {}
    resources = group["template"]["spec"]["containers"][0].get("resources") or {}
    limits = (resources.get("requests") or {}) | (resources.get("limits") or {})
    cpus = parameters.get("num-cpus", limits.get("cpu"))
    return None if cpus is None else _cpus(str(cpus)), int(parameters.get("num-gpus", limits.get(GPU, 0)))


def _cpus(text: str) -> float:
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)


def _check_served(source: YamlSource, cluster: Cluster | None) -> tuple[list[Problem], Serving | None]:
    spec = source.value.get("spec")
    if not isinstance(spec, dict) or not isinstance(spec.get("serveConfigV2"), str):
        return [source.problem(SERVED, "serveConfigV2 is missing, so nothing would be served.")], None
    try:
        inner = source.embedded(SERVED)
    except ConfigError as error:
        return [source.problem(SERVED, error.message)], None
    problems, serving = check_serve(inner)
    problems += inner.repeated_keys()
    if serving is not None and not serving.every_node:
        message = "proxy_location must be EveryNode, since KubeRay considers a pod without a proxy not ready."
        problems.append(inner.problem(("proxy_location",), message))
    if serving is not None and cluster is not None:
        problems += check_fit(serving, cluster)
    return problems, serving
