"""Defines the dashboard that compares engines: steps, batches, caches, memory and slots."""

from __future__ import annotations

from lorafleet.cluster.monitoring.board_queries import (
    ADAPTED,
    BETWEEN,
    QUEUE,
    REPLICAS,
    TIME_TO_FIRST,
    one,
    quantile,
    rate,
    sum_of,
)
from lorafleet.cluster.monitoring.panels import Dashboard, Panel, PanelRow, Query, Variable


def _of_replica(title: str, series: str, unit: str = "short") -> Panel:
    return one(title, f"{series}{{{REPLICAS}}}", "{{replica}}", unit)


REPLICA = Dashboard(
    "lorafleet-replica",
    "lorafleet · replica",
    "One engine or several beside each other: steps, batches, caches, memory, slots.",
    (
        PanelRow(
            "Steps",
            (
                one(
                    "Time of steps",
                    sum_of("le", "lorafleet_engine_step_seconds_bucket", REPLICAS),
                    "{{le}}",
                    kind="heatmap",
                ),
                one(
                    "Time of a step p95",
                    quantile(0.95, "lorafleet_engine_step_seconds", "replica, kind", REPLICAS),
                    "{{replica}} {{kind}}",
                    "s",
                ),
                one(
                    "Time spent in steps",
                    sum_of("replica", "lorafleet_engine_step_seconds_sum", REPLICAS),
                    "{{replica}}",
                    "percentunit",
                    text="1: the engine is never idle.",
                ),
                one(
                    "Sequences of a step, mean",
                    f"{sum_of('replica', 'lorafleet_engine_step_sequences_sum', REPLICAS)} / "
                    f"{sum_of('replica', 'lorafleet_engine_step_sequences_count', REPLICAS)}",
                    "{{replica}}",
                ),
                one(
                    "Tokens of a step, mean",
                    f"{sum_of('replica', 'vllm:iteration_tokens_total_sum', REPLICAS)} / "
                    f"{sum_of('replica', 'vllm:iteration_tokens_total_count', REPLICAS)}",
                    "{{replica}}",
                ),
                one(
                    "Tokens that use an adapter",
                    f"{sum_of('replica', 'lorafleet_engine_step_tokens_total', ADAPTED)} / "
                    f"{sum_of('replica', 'lorafleet_engine_step_tokens_total', REPLICAS)}",
                    "{{replica}}",
                    "percentunit",
                ),
                one(
                    "Steps with adapters",
                    f"{sum_of('replica', 'lorafleet_engine_adapter_steps_total', REPLICAS)} / "
                    f"sum by (replica) ({rate('lorafleet_engine_step_seconds_count', REPLICAS)})",
                    "{{replica}}",
                    "percentunit",
                ),
                one(
                    "Time of a step on the GPU, mean",
                    f"{sum_of('kind, lora, tokens', 'lorafleet_engine_gpu_step_seconds_sum', REPLICAS)} / "
                    f"{sum_of('kind, lora, tokens', 'lorafleet_engine_gpu_step_seconds_count', REPLICAS)}",
                    "{{kind}}, up to {{tokens}} tokens, {{lora}}",
                    "s",
                    text="One step in 32, between two events: beside base steps of as many tokens, what adapters cost.",
                    needs_gpu=True,
                ),
            ),
        ),
        PanelRow(
            "Queue and KV cache",
            (
                _of_replica("Running sequences", "vllm:num_requests_running"),
                _of_replica("Waiting sequences", "vllm:num_requests_waiting"),
                _of_replica("Waiting tokens", "lorafleet_engine_waiting_tokens"),
                _of_replica("KV cache in use", "vllm:kv_cache_usage_perc", "percentunit"),
                one(
                    "Prompt tokens found in the prefix cache",
                    f"{sum_of('replica', 'vllm:prefix_cache_hits_total', REPLICAS)} / "
                    f"{sum_of('replica', 'vllm:prefix_cache_queries_total', REPLICAS)}",
                    "{{replica}}",
                    "percentunit",
                ),
                one("Preemptions", sum_of("replica", "vllm:num_preemptions_total", REPLICAS), "{{replica}}", "ops"),
            ),
        ),
        PanelRow(
            "Latency",
            tuple(
                one(f"{title} p95", quantile(0.95, histogram, "replica", REPLICAS), "{{replica}}", "s")
                for title, histogram in (
                    ("Time to first token", TIME_TO_FIRST),
                    ("Between tokens", BETWEEN),
                    ("Wait in the queue", QUEUE),
                )
            ),
        ),
        PanelRow(
            "Adapters and memory",
            (
                Panel(
                    "Slots",
                    (
                        Query(f"lorafleet_engine_lora_slots{{{REPLICAS}}}", "{{replica}} has"),
                        Query(f"lorafleet_engine_lora_slots_used{{{REPLICAS}}}", "{{replica}} filled"),
                        Query(f"lorafleet_engine_lora_slots_idle{{{REPLICAS}}}", "{{replica}} idle"),
                        Query(f"lorafleet_engine_lora_slots_pinned{{{REPLICAS}}}", "{{replica}} pinned"),
                    ),
                ),
                Panel(
                    "Adapters",
                    (
                        Query(f"lorafleet_engine_lora_adapters_wanted{{{REPLICAS}}}", "{{replica}} wanted"),
                        Query(f"lorafleet_engine_lora_cpu_adapters{{{REPLICAS}}}", "{{replica}} in host memory"),
                    ),
                ),
                one(
                    "Memory by kind",
                    f"sum by (kind) (lorafleet_engine_memory_bytes{{{REPLICAS}}})",
                    "{{kind}}",
                    "bytes",
                ),
                one(
                    "Bytes of adapters by tier",
                    f"sum by (replica, tier) (lorafleet_engine_lora_bytes{{{REPLICAS}}})",
                    "{{replica}} {{tier}}",
                    "bytes",
                ),
                one(
                    "Copies into slots",
                    sum_of("replica", "lorafleet_engine_lora_activations_total", REPLICAS),
                    "{{replica}}",
                    "ops",
                ),
                one(
                    "Engine last heard of",
                    f"lorafleet_client_stats_age_seconds{{{REPLICAS}}}",
                    "{{replica}}",
                    "s",
                ),
            ),
        ),
    ),
    (Variable("replica", "replica", "vllm:num_requests_running"),),
)
