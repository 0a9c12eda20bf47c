"""Connects requests to replicas through the alpha and private parts of Ray Serve 2.60. Ray is pinned to this minor
version because of the names in this file and in haproxy_manager.py.

With direct streaming, HAProxy accepts the client's connection, asks `POST /internal/route` for a replica, and then
talks to the replica's own HTTP server, so no token passes through Ray. proxy_affinity.py is for Serve's own proxy.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray._private import state
from ray.serve import Application
from ray.serve._private import constants, replica
from ray.serve.context import _get_global_client

from lorafleet.cluster.proxy import haproxy, tls
from lorafleet.cluster.routing.route import Route
from lorafleet.cluster.serve.serve_environment import PROXY_MIDDLEWARES


def direct_streaming() -> bool:
    """Returns whether this process was started with RAY_SERVE_ENABLE_HA_PROXY=1."""
    return bool(constants.RAY_SERVE_ENABLE_HA_PROXY)


def open_s() -> float:
    """Returns the seconds in which a replica that is being stopped still takes new connections from HAProxy."""
    return float(constants.RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S) if direct_streaming() else 0.0


def proxy_affinity() -> bool:
    """Returns whether this process, and so probably the proxies, were started with our middleware for them."""
    return bool(constants.RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH == PROXY_MIDDLEWARES)


def with_ingress_router(replicas: Application, router: Application) -> Application:
    return replicas._with_ingress_request_router(router)


def start_handle(handle: Any) -> None:
    """Makes the handle follow its deployment's replicas before the first request."""
    handle._init()


async def choose(handle: Any, route: Route) -> str:
    """Returns the full id of the replica that AffinityRouter picks. Reserves nothing there: HAProxy sends the
    request itself."""
    async with handle.choose_replica(route=route, _reserve=False) as chosen:
        return str(chosen._replica.replica_id.to_full_id_str())


def application_status(name: str) -> tuple[str, str]:
    """Returns the status of an application and its message. serve.status() has them too, but pickles the routers'
    classes at each call, which takes half of the CPU time of a start."""
    client = _get_global_client()
    assert client is not None
    status = client.get_serve_status(name).app_status
    return status.status, status.message


def serve_instance() -> str:
    """Returns the identity of this Ray Serve, which stays until Serve is shut down, or a random one without Serve."""
    client = _get_global_client(raise_if_no_controller_running=False)
    return uuid.uuid4().hex if client is None else str(client._controller._actor_id.hex())


def running_applications(deployment: str) -> list[str]:
    """Returns the applications that have running replicas of a deployment of this name. Unlike serve.status(), it has
    those that are being built anew."""
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return []
    replicas = ray.get(client._controller._all_running_replicas.remote())
    return [found.app_name for found, running in replicas.items() if found.name == deployment and running]


def keep_reconfigured_replicas() -> None:
    """Makes Serve's controller leave a replica in service while it takes changed options. Otherwise the controller
    takes it from HAProxy and all handles until it is done, and one replica alone would leave nobody to answer."""
    from ray.serve._private.common import ReplicaState
    from ray.serve._private.deployment_state import DeploymentState  # Only the controller has imported it already.

    DeploymentState._BROADCAST_STATES |= {ReplicaState.UPDATING}
    in_service = list(DeploymentState._BROADCAST_STATES)

    def running(self: Any) -> list[Any]:
        return [
            found.get_running_replica_info(self._cluster_node_info_cache) for found in self._replicas.get(in_service)
        ]

    DeploymentState.get_running_replica_infos = running  # type: ignore[method-assign]  # There is no other way in.


def watch_haproxy() -> None:
    """Makes Serve's controller start our manager of HAProxy in place of its own, and keep an application reachable
    while its next version is built. Serve calls this when its controller starts."""
    keep_reconfigured_replicas()
    from ray.serve._private import controller  # Only the controller's process has imported it already.

    from lorafleet.cluster.proxy.haproxy_manager import Manager
    from lorafleet.cluster.proxy.serves_controller import keep_ingress

    vars(controller)["HAProxyManager"] = Manager
    keep_ingress()


def num_running(deployment: str) -> int:
    """Returns the number of replicas that run in the deployments of this name. If several applications have one, it
    is that of the smallest, since Serve does not tell a builder the name of its application."""
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return 0
    running = ray.get(client._controller._all_running_replicas.remote())
    return min((len(replicas) for id, replicas in running.items() if id.name == deployment), default=0)


def free_resources() -> list[dict[str, float]]:
    """Returns the free resources of each node."""
    return list(state.available_resources_per_node().values())  # type: ignore[no-untyped-call]  # Ray's own omission


def answer_health_checks(is_well: Callable[[], bool]) -> None:
    """Makes HAProxy's health checks fail while this replica cannot answer requests. Call it in a replica's process.
    These are not Serve's own health checks, after which Serve replaces a replica.

    The checks of a replica that is being stopped do not fail, unlike Serve's, until it takes no more connections. When
    the last of the former replicas stops, HAProxy may not know the new ones yet, and would have no replica.
    """
    serves_check = replica.Replica._dataplane_health_check

    async def check(self: Any) -> tuple[bool, str]:
        if not is_well():
            return False, "UNHEALTHY"
        if self._shutting_down and self._healthy:
            return True, constants.HEALTHY_MESSAGE
        return await serves_check(self)

    replica.Replica._dataplane_health_check = check  # type: ignore[method-assign]  # There is no other way in.


def listen_on_node_address() -> None:
    """Binds the gRPC server that Serve starts in each replica, for calls by handle, to the node's own address, where
    handles look for it, and not to all interfaces. Call it in a replica's process, before the replica is up."""
    name = "add_port_to_grpc_server"
    add_port = vars(replica)[name]
    host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # Ray's
    address = f"[{host}]:0" if ":" in host else f"{host}:0"
    vars(replica)[name] = lambda server, _all_interfaces: add_port(server, address)


def http_options() -> Any:
    """Returns Serve's HTTP options, which have the address where it listens, or None if Serve does not run."""
    client = _get_global_client(raise_if_no_controller_running=False)
    return None if client is None else client.http_config


async def keep_certificate() -> None:
    """Renews the certificate of this node's HAProxy, if it is ours and serves TLS. Otherwise returns at once."""
    files = tls.files_from_environment(os.environ)
    if files is None or not direct_streaming():
        return
    node = ray.get_runtime_context().get_node_id()
    pem = _of_node(constants.RAY_SERVE_HAPROXY_CONFIG_FILE_LOC, node).with_name(haproxy.PEM_NAME)
    await tls.keep_renewing(files, str(_of_node(constants.RAY_SERVE_HAPROXY_SOCKET_PATH, node)), str(pem))


def _of_node(path: str, node: str) -> Path:
    """Returns the path of a file of this node's HAProxy. Serve keeps the files of each node in a separate folder."""
    return Path(path).parent / node / Path(path).name
