"""Builds the Ray Serve application. `serve run` imports `lorafleet.cluster.serve.app:build`."""

# There is no `from __future__ import annotations` here, since Serve needs the type of build's argument as an object.

import dataclasses
import logging
import os
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from lorafleet.cluster.config import KEY_VARIABLES, AppArgs, with_keys
from lorafleet.cluster.deploys.changed_options import user_config_of, version_of
from lorafleet.cluster.deploys.deployment_version import Deployed, with_version
from lorafleet.cluster.deploys.running_check import ProposedDeploy, check_running
from lorafleet.cluster.deploys.sealed_secrets import seal
from lorafleet.cluster.proxy import ingress
from lorafleet.cluster.proxy.exposure import check_exposure, check_tls
from lorafleet.cluster.routing.router import AdapterRouter, AffinityRouter
from lorafleet.cluster.serve.replica import EngineReplica
from lorafleet.cluster.serve.resources import FRONT_CPUS, check_gpus, num_fitting, replica_bundles, surge_percent
from lorafleet.cluster.serve.serve_environment import PROXY_MIDDLEWARES
from lorafleet.protocol.engine_config import Device, EngineConfig
from lorafleet.protocol.errors import ConfigError

HEALTH_PERIOD_S = 0.5  # Serve replaces a replica after three failed checks.
HEALTH_TIMEOUT_S = 15.0
MAX_START_ATTEMPTS = 3
REPLICAS = "EngineReplica"  # Name of the replicas' deployment.
QUIET = LoggingConfig(enable_access_log=False)  # A line for every request costs 0.1 ms; /metrics counts requests.
MAX_ROUTED = 10_000  # Requests that may wait for a router's answer.

logger = logging.getLogger("lorafleet.cluster")


def build(args: AppArgs) -> Application:
    """Builds the replicas of one base model and, with direct streaming, the router in front of them."""
    args = with_keys(args, os.environ)
    options = ingress.http_options()
    if options is not None and options.host is not None:
        check_exposure(options.host, args)
        check_tls(options.ssl_certfile is not None, ingress.direct_streaming())
    config = dataclasses.replace(args.engine_config(), device=_device(args))
    version = version_of(args, config.device, runtime_env())
    check_running(ProposedDeploy(version, args, is_final=_is_final(args, config.device)))
    deployment = with_version(replicas(args, config), version)
    bound = deployment.bind(args, config, Deployed(version, ingress.serve_instance()))
    if not ingress.direct_streaming():
        if args.most_replicas > 1 and not ingress.proxy_affinity():
            logger.warning(
                "requests are routed without regard to their adapter, so every replica will load the adapters of all "
                "requests. Start Ray with RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=%s in its environment, or with "
                "direct streaming (docs/running-on-a-cluster.md).",
                PROXY_MIDDLEWARES,
            )
        return bound
    routing = with_version(router(args), version)
    bound_router = routing.bind(bound, args.admin_key, args.api_keys, args.otlp_traces_endpoint is not None)
    return ingress.with_ingress_router(bound, bound_router)


def _device(args: AppArgs) -> Device:
    num_gpus = node_gpus()
    if args.device == "cpu" or (args.device == "auto" and not any(num_gpus)):
        return "cpu"
    try:
        check_gpus(args, num_gpus)
    except ConfigError as error:
        if args.device == "auto":
            raise
        # A cluster may still grow: nodes with GPUs may join after this deployment, or be started because of it.
        logger.warning("%s Until then, replicas wait for GPUs.", error.message)
    return "cuda"


def node_gpus() -> list[int]:
    """Returns the number of GPUs of each live node."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]  # Ray's own omission
    return [int(node["Resources"].get("GPU", 0)) for node in nodes if node["Alive"]]


def runtime_env() -> dict[str, Any]:
    """Returns the runtime environment of this process, which replicas get too."""
    return dict(ray.get_runtime_context().runtime_env)


def replicas(args: AppArgs, config: EngineConfig) -> serve.Deployment:
    """Returns the deployment of the replicas."""
    bundles = replica_bundles(args, config.device)
    return serve.deployment(
        name=REPLICAS,
        user_config=user_config_of(args, seal),
        **_scaling(args),
        max_surge_percent=_surge_percent(args, bundles),
        max_ongoing_requests=args.max_ongoing_requests,
        max_constructor_retry_count=MAX_START_ATTEMPTS,
        ray_actor_options={"num_cpus": FRONT_CPUS},
        placement_group_bundles=bundles,
        placement_group_strategy="STRICT_PACK",  # The processes communicate over Unix sockets.
        request_router_config=RequestRouterConfig(
            request_router_class=AffinityRouter,  # type: ignore[arg-type]  # Serve's annotation is of what it stores
            request_router_kwargs={"directory": args.directory_place(), "routing": args.routing},
        ),
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=ingress.open_s() + args.drain_timeout,  # Serve counts from the order to stop.
        logging_config=QUIET,
    )(serve.ingress()(EngineReplica))


def _surge_percent(args: AppArgs, bundles: list[dict[str, float]]) -> int:
    """Returns how many replicas of this version may start beside those that run, as surge_percent() does."""
    running = ingress.num_running(REPLICAS)
    if running == 0:
        return 0
    wanted = min(max(running, args.num_replicas), args.most_replicas)
    return surge_percent(wanted, running, num_fitting(bundles, ingress.free_resources()))


def _is_final(args: AppArgs, device: Device) -> bool:
    """Returns whether replicas of this version have room only where others stop before. With a working directory of
    their own, they may see other files than those do, which then cannot be asked."""
    return "working_dir" not in runtime_env() and _surge_percent(args, replica_bundles(args, device)) == 0


def _scaling(args: AppArgs) -> dict[str, Any]:
    if args.max_replicas is None:
        return {"num_replicas": args.num_replicas}
    window_s = min(max(args.upscale_delay_s, 1.0), 30.0)
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=args.num_replicas,
            max_replicas=args.max_replicas,
            upscale_delay_s=args.upscale_delay_s,
            downscale_delay_s=args.downscale_delay_s,
            look_back_period_s=window_s,
            metrics_interval_s=window_s / 3,
            policy=AutoscalingPolicy(  # type: ignore[no-untyped-call]  # Ray's own omission
                policy_function="lorafleet.cluster.serve.autoscaling:LoadPolicy",
                policy_kwargs={"target": args.target_load},
            ),
        )
    }


def router(args: AppArgs) -> serve.Deployment:
    """Returns the deployment that HAProxy asks for a replica."""
    keys = {name: value for name, value in user_config_of(args, seal).items() if name in KEY_VARIABLES}
    return serve.deployment(
        name="AdapterRouter",
        user_config=keys,
        max_ongoing_requests=MAX_ROUTED,
        ray_actor_options={"num_cpus": 0},
        max_surge_percent=100,  # It needs no room, so the new one is there before the former one stops.
    )(serve.ingress()(AdapterRouter))
