"""Defines the dashboard of traffic, latency, errors and saturation of the whole cluster."""

from __future__ import annotations

from lorafleet.cluster.monitoring.board_queries import (
    BETWEEN,
    JOB,
    LOADS_THAT_SUCCEED,
    QUEUE,
    TIME_TO_FIRST,
    one,
    part,
    quantile,
    quantiles,
    stat,
    sum_of,
    total,
)
from lorafleet.cluster.monitoring.panels import Dashboard, Panel, PanelRow, Query

OVERVIEW = Dashboard(
    "lorafleet-overview",
    "lorafleet · overview",
    "Traffic, latency, errors and saturation of the whole cluster.",
    (
        PanelRow(
            "Now",
            (
                stat("Replicas in the scrape", f"count(vllm:num_requests_running{{{JOB}}})"),
                stat("Scrape complete", f"min(lorafleet_scrape_complete{{{JOB}}})", text="1: every replica answered."),
                stat("Requests", total("lorafleet_requests_total"), "reqps"),
                stat("Tokens answered", total("vllm:generation_tokens_total"), "tokps"),
                stat("Time to first token p95", quantile(0.95, TIME_TO_FIRST), "s"),
                stat("Answered with 5xx", part('status=~"5.."', "lorafleet_requests_total"), "percentunit"),
            ),
        ),
        PanelRow(
            "Traffic",
            (
                one("Requests by status", sum_of("status", "lorafleet_requests_total"), "{{status}}", "reqps"),
                one("Requests by endpoint", sum_of("endpoint", "lorafleet_requests_total"), "{{endpoint}}", "reqps"),
                Panel(
                    "Tokens",
                    (
                        Query(total("vllm:prompt_tokens_total"), "prompt"),
                        Query(total("vllm:generation_tokens_total"), "answer"),
                    ),
                    "tokps",
                ),
                one(
                    "Sequences by their end",
                    sum_of("finished_reason", "vllm:request_success_total"),
                    "{{finished_reason}}",
                    "ops",
                ),
                one("Refused for overload (429)", part('status="429"', "lorafleet_requests_total"), unit="percentunit"),
                one(
                    "Refused sequences by bound", sum_of("bound", "lorafleet_engine_refused_total"), "{{bound}}", "ops"
                ),
            ),
        ),
        PanelRow(
            "Latency",
            (
                Panel("Time to first token", quantiles(TIME_TO_FIRST), "s"),
                Panel("Between tokens", quantiles(BETWEEN), "s"),
                Panel("Wait in the queue", quantiles(QUEUE), "s"),
            ),
        ),
        PanelRow(
            "Saturation",
            (
                Panel(
                    "Sequences",
                    (
                        Query(f"sum(vllm:num_requests_running{{{JOB}}})", "running"),
                        Query(f"sum(vllm:num_requests_waiting{{{JOB}}})", "waiting"),
                    ),
                ),
                one(
                    "KV cache in use",
                    f"max(vllm:kv_cache_usage_perc{{{JOB}}})",
                    "fullest replica",
                    "percentunit",
                ),
                one(
                    "Slots that running sequences need",
                    f"1 - sum(lorafleet_engine_lora_slots_idle{{{JOB}}}) / sum(lorafleet_engine_lora_slots{{{JOB}}})",
                    "of all replicas",
                    "percentunit",
                ),
                one(
                    "Where adapters were when asked for",
                    f"{sum_of('tier', 'lorafleet_adapter_hits_total')} / ignoring (tier) group_left "
                    f"{total('lorafleet_adapter_hits_total')}",
                    "{{tier}}",
                    "percentunit",
                ),
                one("Adapter loads that succeed", LOADS_THAT_SUCCEED, unit="percentunit"),
                one(
                    "Prompt tokens found in the prefix cache",
                    f"{total('vllm:prefix_cache_hits_total')} / {total('vllm:prefix_cache_queries_total')}",
                    unit="percentunit",
                ),
            ),
        ),
    ),
)
