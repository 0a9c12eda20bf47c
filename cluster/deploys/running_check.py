"""Asks running replicas whether they could take a deploy's options, before Ray Serve is given the deploy.

A deploy that fails here changes nothing, and `serve status` says why. Later Serve would stop replicas instead.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Sequence
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
    is_final: bool  # Whether a running replica stops before one that replaces it has started, since there is no room.


def check_running(proposed: ProposedDeploy) -> None:
    """Raises ConfigError with the reason of a running replica against the deploy. Replicas of other applications have
    other versions, or serve the same model from the same files, so they answer just as well."""
    applications = ingress.running_applications(REPLICAS)
    if not applications:
        return
    asked = asyncio.run_coroutine_threadsafe(_refusals(proposed, applications), _loop())
    if refusals := asked.result():
        raise ConfigError(f"{refusals[0]} Nothing was changed.")


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Returns an event loop that runs in a thread of its own until the process ends. Handles need one that goes on, and
    the caller may be in one that it blocks."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="deploy-check", daemon=True).start()
    return loop


async def _refusals(proposed: ProposedDeploy, applications: Sequence[str]) -> list[str]:
    refusals: list[str] = []
    for application in applications:
        handle = serve.get_deployment_handle(REPLICAS, application)
        try:
            answers = await handle.broadcast("check_deploy", proposed).results_async(
                timeout_s=CHECK_S, return_exceptions=True
            )
        except (RayServeException, TimeoutError):  # The replicas end, or are stopped: Serve replaces them.
            continue
        refusals += [answer for answer in answers if isinstance(answer, str)]
    return refusals
