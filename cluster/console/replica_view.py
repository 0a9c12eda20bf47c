"""Builds one replica's report for the console, and requests the reports of all replicas."""

from __future__ import annotations

import logging
from typing import Any

from lorafleet.api.app_state import AppState
from lorafleet.cluster.console.view import ALL_REPLICAS, ReplicaQuery, ReplicaView, Viewer

PATIENCE_S = 2.0  # A slower replica is shown without the data that only it has.
BUSIEST = 50

logger = logging.getLogger("lorafleet.cluster")


def replica_view(
    front: AppState, query: ReplicaQuery, viewer: Viewer, cpu_loras: int, max_num_seqs: int
) -> ReplicaView:
    stats, recent, tenant = front.engine.stats, front.telemetry.recent, viewer.tenant
    of_all = viewer.sees_all
    with_history = query.history_of in (ALL_REPLICAS, front.config.replica_id)
    return ReplicaView(
        replica=front.config.replica_id,
        slots=stats.resident_slots,
        in_cpu=stats.resident_cpu,
        cpu_loras=cpu_loras,
        waiting=stats.waiting_adapters,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        max_num_seqs=max_num_seqs,
        kv_used=1 - stats.kv_blocks_free / max(1, stats.kv_blocks_total),
        lora_memory_used=stats.lora_memory_used_bytes / max(1, stats.lora_memory_total_bytes),
        traffic=recent.of_names(query.names, tenant, of_all=of_all),
        total=recent.total(tenant, of_all=of_all),
        failures=front.telemetry.failures.of(tenant, of_all=of_all),
        busiest=recent.busiest(BUSIEST, tenant, of_all=of_all),
        history=front.telemetry.history.report(tenant, of_all=of_all) if with_history else None,
    )


async def ask_all(replicas: Any, query: ReplicaQuery, viewer: Viewer) -> list[ReplicaView]:
    """Returns the reports of the replicas that answer in time. `replicas` is a handle whose deployment has look()."""
    try:
        answers = await replicas.broadcast("look", query, viewer).results_async(
            timeout_s=PATIENCE_S, return_exceptions=True
        )
    except TimeoutError:
        return []
    for error in (answer for answer in answers if isinstance(answer, Exception)):
        logger.warning("a replica did not report its state to the console: %r", error)
    return [answer for answer in answers if isinstance(answer, ReplicaView)]
