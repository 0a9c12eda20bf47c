"""Declares the options of the replicas: how many there are, how requests reach them, and how many each takes."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, Field, model_validator

from lorafleet.cluster.routing.rule_names import RoutingRule
from lorafleet.protocol.engine_config import QueuedRequests, QueuedTokens
from lorafleet.protocol.limits import MAX_BODY_BYTES, RESPONSE_STORE_BYTES
from lorafleet.protocol.options import Change


class ReplicaOptions(BaseModel, frozen=True):
    """The part of AppArgs (cluster/config.py) that concerns replicas."""

    num_replicas: Annotated[int, Change.BY_SERVE] = Field(
        1, ge=1, description="Number of replicas. Each holds the whole base model."
    )
    max_replicas: Annotated[int | None, Change.BY_SERVE] = Field(
        None, ge=1, description="Largest number of replicas under load. Default: num_replicas, without autoscaling."
    )
    target_load: Annotated[float, Change.BY_SERVE] = Field(
        0.7,
        gt=0,
        le=1,
        description="With max_replicas: target share of each replica's sequences and KV tokens in use, 0 to 1.",
    )
    upscale_delay_s: Annotated[float, Change.BY_SERVE] = Field(
        30.0,
        ge=0,
        allow_inf_nan=False,
        description="With max_replicas: seconds of sustained overload before a replica is added.",
    )
    downscale_delay_s: Annotated[float, Change.BY_SERVE] = Field(
        600.0,
        ge=0,
        allow_inf_nan=False,
        description="With max_replicas: seconds of low load before a replica is removed.",
    )
    routing: RoutingRule = Field(
        "affinity",
        description="Rule by which requests find a replica. affinity: where the first token is expected soonest, with "
        "adapters placed by demand. For comparison, and without placement: sticky (Ray Serve's model multiplexing), "
        "power-of-two (Ray Serve's default), round-robin.",
    )
    num_cpus: float = Field(
        0.1, gt=0, allow_inf_nan=False, description="CPUs that Ray reserves for each worker. Fractions are allowed."
    )
    max_ongoing_requests: Annotated[int, Change.BY_SERVE] = Field(
        1024, ge=1, description="Maximum number of requests that Ray Serve sends to one replica at a time."
    )
    # An engine has no such bounds by default.
    max_queued_requests: Annotated[QueuedRequests, Change.IN_REPLICA] = 512
    max_queued_tokens: Annotated[QueuedTokens, Change.IN_REPLICA] = 2_000_000
    queue_timeout: Annotated[float | None, Change.IN_REPLICA] = Field(
        None,
        ge=0,
        allow_inf_nan=False,
        description="Seconds that a request may wait to start before it is rejected with 429 and Retry-After. Its "
        "X-Queue-Timeout-Seconds header overrides this. Default: no limit.",
    )
    drain_timeout: Annotated[float, Change.BY_SERVE] = Field(
        300.0,
        ge=1,
        allow_inf_nan=False,
        description="Seconds to end the answers that have begun, when a replica is stopped because fewer are needed or "
        "its node is drained, and when `lorafleet serve` is stopped. Those that take longer are cut off.",
    )
    max_body_bytes: Annotated[int, Change.IN_REPLICA] = Field(
        MAX_BODY_BYTES, ge=1, description="Largest request body in bytes. Larger ones are rejected with 413."
    )
    response_store_bytes: Annotated[int, Change.IN_REPLICA] = Field(
        RESPONSE_STORE_BYTES, ge=0, description="Bytes of /v1/responses' answers that each replica stores; 0: none."
    )

    @model_validator(mode="after")
    def _has_a_range(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.num_replicas:
            raise ValueError(
                f"max_replicas={self.max_replicas} is below num_replicas={self.num_replicas}, the minimum. Raise "
                "max_replicas or lower num_replicas."
            )
        return self

    @property
    def most_replicas(self) -> int:
        return self.num_replicas if self.max_replicas is None else self.max_replicas
