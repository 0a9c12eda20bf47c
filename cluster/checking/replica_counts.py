"""Checks the number of replicas that `deployments` in a Serve file gives beside `args`. Ray Serve changes it in place
from either, and takes that of `deployments` if both are there."""

from __future__ import annotations

from typing import Any

from lorafleet.cluster.checking.yaml_source import Place, Problem, YamlSource
from lorafleet.cluster.config import AppArgs

REPLICAS, ROUTER = "EngineReplica", "AdapterRouter"
COUNTS = ("num_replicas", "autoscaling_config")
AUTO = (1, 100)  # Ray Serve's bounds for num_replicas: auto.


def check_replica_counts(
    source: YamlSource, place: Place, application: dict[str, Any], args: AppArgs
) -> tuple[list[Problem], AppArgs]:
    """Returns the problems, and the arguments with the numbers of replicas that would run."""
    problems: list[Problem] = []
    for number, deployment in enumerate(application.get("deployments") or []):
        if not isinstance(deployment, dict):
            continue
        where: Place = (*place, "deployments", number)
        if deployment.get("name") == ROUTER:
            problems += [
                source.problem((*where, name), "Ray Serve runs one router on each node with a proxy; remove this.")
                for name in COUNTS
                if name in deployment
            ]
        elif deployment.get("name") == REPLICAS and any(name in deployment for name in COUNTS):
            found = _bounds(deployment)
            if found is None:
                continue  # Serve's own schema has a message for it.
            fewest, most = found
            problems += _contradictions(source, where, deployment, application["args"], fewest, most)
            args = args.model_copy(update={"num_replicas": fewest, "max_replicas": most})
    return problems, args


def _bounds(deployment: dict[str, Any]) -> tuple[int, int | None] | None:
    """Returns the fewest and the most replicas; the latter is None without autoscaling. Returns None for values that
    are no numbers."""
    count, scaling = deployment.get("num_replicas"), deployment.get("autoscaling_config")
    if type(count) is int and scaling is None:
        return max(1, count), None
    scaling = {} if scaling is None else scaling
    if not isinstance(scaling, dict):
        return None
    low, high = AUTO if count == "auto" else (1, 1)
    fewest, most = scaling.get("min_replicas", low), scaling.get("max_replicas", high)
    return (max(1, fewest), most) if type(fewest) is int and type(most) is int else None


def _contradictions(
    source: YamlSource, where: Place, deployment: dict[str, Any], given: dict[str, Any], fewest: int, most: int | None
) -> list[Problem]:
    """Returns a problem for each number in `args` that `deployments` would silently replace by another one."""
    name = next(name for name in COUNTS[::-1] if name in deployment)
    in_place = {"num_replicas": fewest, "max_replicas": most}
    return [
        source.problem(
            (*where, name),
            f"args: {option}={given[option]} says otherwise, and Ray Serve takes this one. Give the number of replicas "
            "in one of the two places.",
        )
        for option, value in in_place.items()
        if given.get(option) not in (None, value)
    ]
