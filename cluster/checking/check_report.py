"""Describes in words what would run where. The other files of this folder check it."""

from __future__ import annotations

from collections.abc import Iterator

from lorafleet.cluster.checking.nodes import Cluster, NodeGroup
from lorafleet.cluster.checking.serve_file import Application, Serving
from lorafleet.cluster.config import AppArgs

REPLICA_PORTS = "30000 to 31000"  # Serve's ports with direct streaming.
DIRECTORY_PORTS = "20000 to 31999"


def describe(serving: Serving | None, cluster: Cluster | None) -> Iterator[str]:
    for group in cluster.groups if cluster is not None else ():
        yield _group(group)
    if serving is None:
        return
    where = "every node" if serving.every_node else "the head node"
    yield f"ingress      http://{serving.host}:{serving.port} on {where}"
    yield (
        f"ports        replicas: {REPLICA_PORTS} with direct streaming; directory, and adapters between nodes: some of "
        f"{DIRECTORY_PORTS}"
    )
    for application in serving.applications:
        yield from _application(application)
    for name in serving.others:
        yield f"application  {name}: not a lorafleet application; its args are not checked"


def _group(group: NodeGroup) -> str:
    nodes = f"{group.least}" if group.least == group.most else f"{group.least} to {group.most}"
    gpus = "as many GPUs as the machine has" if group.num_gpus is None else f"{group.num_gpus} GPUs"
    cpus = "" if group.num_cpus is None else f", {group.num_cpus:g} CPUs"
    role = "; runs Ray's and Serve's controllers, the adapter directory and the ingress" if group.head else ""
    each = " each" if group.most > 1 else ""
    return f"nodes        {group.name}: {nodes} with {gpus}{cpus}{each}{role}"


def _application(application: Application) -> Iterator[str]:
    args = application.args
    yield f"application  {application.name}: {', '.join(args.base_names)}, from {args.model}"
    yield f"replicas     {_replicas(args)}"
    names = [module.name for module in args.lora_modules]
    yield f"adapters     {', '.join(names) or 'none at startup'}; at most {args.max_loras} in use at the same time"
    yield f"resolvers    {', '.join(args.resolver_order) or 'none'}"
    yield f"catalogue    {args.catalog_uri or 'a folder on the head node'}"


def _replicas(args: AppArgs) -> str:
    many = (
        str(args.num_replicas)
        if args.most_replicas == args.num_replicas
        else (f"{args.num_replicas} to {args.most_replicas}")
    )
    if args.device == "cpu":
        return f"{many} on CPUs, each with {args.tensor_parallel_size} workers of {args.num_cpus:g} CPUs"
    kind = "GPU" if args.device == "cuda" else "GPU, or CPU where there is none"
    size = args.tensor_parallel_size
    return f"{many} x {size} {kind}{', on one node' if size > 1 else ''}, {args.num_cpus:g} CPUs per worker"
