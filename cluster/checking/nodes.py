"""Describes the machines that a file asks for, and checks whether an application's replicas fit on them."""

from __future__ import annotations

from dataclasses import dataclass

from lorafleet.cluster.checking.serve_file import Application, Serving
from lorafleet.cluster.checking.yaml_source import Problem


@dataclass(frozen=True, slots=True)
class NodeGroup:
    name: str
    head: bool
    least: int  # Smallest number of nodes.
    most: int  # Largest number of nodes.
    num_cpus: float | None  # CPUs of each node; None if only the machine knows.
    num_gpus: int | None  # GPUs of each node; None if only the machine knows.


@dataclass(frozen=True, slots=True)
class Cluster:
    groups: tuple[NodeGroup, ...]
    most_workers: int | None = None  # Limit for all worker groups together.

    @property
    def several_nodes(self) -> bool:
        return sum(group.most for group in self.groups) > 1

    def room(self, size: int) -> int | None:
        """Returns how many replicas of `size` GPUs fit at most, each on one node. None if a group does not say how
        many GPUs it has."""
        total, workers = 0, self.most_workers
        for group in sorted(self.groups, key=lambda node_group: -(node_group.num_gpus or 0)):
            if group.num_gpus is None:
                return None
            nodes = group.most if workers is None or group.head else min(group.most, workers)
            workers = workers if workers is None or group.head else workers - nodes
            total += nodes * (group.num_gpus // size)
        return total


def check_fit(serving: Serving, cluster: Cluster) -> list[Problem]:
    problems = []
    for application in serving.applications:
        problems += _check_gpus(serving, application, cluster)
        problems += _check_catalogue(serving, application, cluster)
    if cluster.several_nodes and serving.host in ("127.0.0.1", "localhost", "::1"):
        problems.append(
            serving.source.problem(
                ("http_options", "host"),
                f"host is {serving.host}, on which replicas listen too, so replicas on other nodes could not be "
                "reached. Set 0.0.0.0, and keep ports other than the ingress's closed to the outside.",
            )
        )
    return problems


def _check_gpus(serving: Serving, application: Application, cluster: Cluster) -> list[Problem]:
    args, place = application.args, (*application.place, "args")
    with_gpus = any(group.num_gpus != 0 for group in cluster.groups)
    if args.device == "cpu":
        return []
    if args.device == "auto":
        message = (
            "device is auto, which means the CPU until a node with a GPU has joined. Set device: cuda."
            if with_gpus
            else "device is auto, and no node has a GPU. Set device: cpu."
        )
        return [serving.source.problem((*place, "device"), message)]
    size = args.tensor_parallel_size
    room = cluster.room(size)
    if room is None or room >= args.most_replicas:
        return []
    name = "num_replicas" if args.max_replicas is None else "max_replicas"
    gpus = f"{size} GPU{'s' if size > 1 else ''}"
    message = (
        f"{name}={args.most_replicas} replicas of {gpus} on one node do not fit: all nodes together, at their maximum "
        f"number, have room for {room}. Lower {name}, or raise max_workers or the GPUs of a node."
    )
    return [serving.source.problem((*place, name), message)]


def _check_catalogue(serving: Serving, application: Application, cluster: Cluster) -> list[Problem]:
    uri = application.args.catalog_uri
    if not cluster.several_nodes or (uri is not None and (uri.startswith("s3://") or uri.startswith("/"))):
        return []
    message = (
        "catalog_uri is not set, so the catalogue would be in a folder on one node, which the others cannot see. "
        if uri is None
        else f"catalog_uri={uri!r} is not an absolute path, so every node would have a folder of its own. "
    )
    place = (*application.place, "args", "catalog_uri")
    return [serving.source.problem(place, message + "Set s3://bucket/prefix, or a folder that all nodes share.")]
