"""How requests reach replicas: everything that is alpha or private in Ray Serve 2.60 is in this file.

Direct streaming: HAProxy takes the client's connection, asks `POST /internal/route` for a replica, and then speaks with
the replica's own HTTP server: no token passes through Ray. Serve's own proxy: proxy_affinity.py. Ray is pinned to this
minor version because of these names.
"""

from __future__ import annotations

from typing import Any

from ray.serve import Application
from ray.serve._private import constants

from lorafleet.cluster.route import Route
from lorafleet.cluster.serve_environment import PROXY_MIDDLEWARES


def direct_streaming() -> bool:
    """Whether this process was started with RAY_SERVE_ENABLE_HA_PROXY=1."""
    return bool(constants.RAY_SERVE_ENABLE_HA_PROXY)


def proxy_affinity() -> bool:
    """Whether this process, and so probably the proxies, were started with our middleware for them."""
    return bool(constants.RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH == PROXY_MIDDLEWARES)


def with_ingress_router(replicas: Application, router: Application) -> Application:
    return replicas._with_ingress_request_router(router)


def start_handle(handle: Any) -> None:
    """Makes the handle follow its deployment's replicas before the first request."""
    handle._init()


async def choose(handle: Any, route: Route) -> str:
    """The full id of the replica that AffinityRouter picks. Reserves nothing: the request itself goes by HAProxy."""
    async with handle.choose_replica(route=route, _reserve=False) as chosen:
        return str(chosen._replica.replica_id.to_full_id_str())
