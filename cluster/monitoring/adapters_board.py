"""Defines the dashboard that shows who uses which adapter, and how adapters get to the GPUs."""

from __future__ import annotations

from lorafleet.cluster.monitoring.board_queries import (
    BETWEEN,
    JOB,
    LOADS_THAT_SUCCEED,
    MODELS,
    QUEUE,
    TIME_TO_FIRST,
    one,
    quantile,
    sum_of,
    top,
    total,
)
from lorafleet.cluster.monitoring.panels import Dashboard, Panel, PanelRow, Query, Variable

ADAPTERS = Dashboard(
    "lorafleet-adapters",
    "lorafleet · adapters",
    "Who asks for which adapter, how fast it is answered, and how adapters come to the GPUs. `other`: all that have no "
    "label of their own.",
    (
        PanelRow(
            "By adapter",
            (
                Panel(
                    "Adapters",
                    (
                        Query(sum_of("model_name", "lorafleet_requests_total", MODELS), "requests / s"),
                        Query(sum_of("model_name", "vllm:prompt_tokens_total", MODELS), "prompt tokens / s"),
                        Query(sum_of("model_name", "vllm:generation_tokens_total", MODELS), "answer tokens / s"),
                        Query(quantile(0.95, TIME_TO_FIRST, "model_name", MODELS), "first token p95, s"),
                        Query(quantile(0.95, BETWEEN, "model_name", MODELS), "between tokens p95, s"),
                        Query(quantile(0.95, QUEUE, "model_name", MODELS), "queue p95, s"),
                    ),
                    kind="table",
                    width=24,
                ),
                top("Requests", sum_of("model_name", "lorafleet_requests_total", MODELS), "reqps"),
                top("Prompt tokens", sum_of("model_name", "vllm:prompt_tokens_total", MODELS), "tokps"),
                top("Answer tokens", sum_of("model_name", "vllm:generation_tokens_total", MODELS), "tokps"),
                top("Time to first token p95", quantile(0.95, TIME_TO_FIRST, "model_name", MODELS), "s"),
                top("Between tokens p95", quantile(0.95, BETWEEN, "model_name", MODELS), "s"),
                top("Wait in the queue p95", quantile(0.95, QUEUE, "model_name", MODELS), "s"),
                top("Whole request p95", quantile(0.95, "vllm:e2e_request_latency_seconds", "model_name", MODELS), "s"),
                one(
                    "Requests that fail",
                    sum_of("model_name, status", "lorafleet_requests_total", f'{JOB},status=~"[45].."'),
                    "{{model_name}} {{status}}",
                    "reqps",
                    text="Of all adapters; without a name: no such model.",
                ),
                one(
                    "Sequences by their end",
                    sum_of("model_name, finished_reason", "vllm:request_success_total", MODELS),
                    "{{model_name}} {{finished_reason}}",
                    "ops",
                ),
            ),
        ),
        PanelRow(
            "Quality probes",
            (
                one(
                    "Agreement with the baseline",
                    f"lorafleet_quality_agreement{{{JOB}}}",
                    "{{model_name}}",
                    "percentunit",
                    text="Share of the baseline's greedy answers that the model gives again.",
                ),
                one("Drift of logprobs", f"lorafleet_quality_drift{{{JOB}}}", "{{model_name}}"),
                Panel(
                    "Perplexity",
                    (
                        Query(f"lorafleet_quality_perplexity{{{JOB}}}", "{{model_name}}"),
                        Query(f"lorafleet_quality_baseline_perplexity{{{JOB}}}", "baseline of {{model_name}}"),
                    ),
                ),
            ),
        ),
        PanelRow(
            "By rank",
            (
                one(
                    "Time to first token p95",
                    quantile(0.95, "lorafleet_rank_time_to_first_token_seconds", "rank"),
                    "rank {{rank}}",
                    "s",
                    text="The adapter's rank, rounded up to a power of two; 0 is the base.",
                ),
                one(
                    "Between tokens p50",
                    quantile(0.5, "lorafleet_rank_inter_token_latency_seconds", "rank"),
                    "rank {{rank}}",
                    "s",
                ),
                one(
                    "Between tokens p95",
                    quantile(0.95, "lorafleet_rank_inter_token_latency_seconds", "rank"),
                    "rank {{rank}}",
                    "s",
                ),
            ),
        ),
        PanelRow(
            "Between tiers",
            (
                one(
                    "Hit rate by tier",
                    f"{sum_of('tier', 'lorafleet_adapter_hits_total', MODELS)} / ignoring (tier) group_left "
                    f"{total('lorafleet_adapter_hits_total', MODELS)}",
                    "{{tier}}",
                    "percentunit",
                ),
                one(
                    "Time to bring adapters nearer, and to drop them: p95",
                    quantile(0.95, "lorafleet_adapter_move_seconds", "source, target"),
                    "{{source}} to {{target}}",
                    "s",
                ),
                one(
                    "Moves",
                    sum_of("source, target", "lorafleet_adapter_move_seconds_count"),
                    "{{source}} to {{target}}",
                    "ops",
                ),
                one(
                    "Slowest to load, mean",
                    f"topk(10, {sum_of('model_name, tier', 'lorafleet_adapter_load_seconds_sum', MODELS)} / "
                    f"({sum_of('model_name, tier', 'lorafleet_adapter_load_seconds_count', MODELS)} > 0))",
                    "{{model_name}} from {{tier}}",
                    "s",
                ),
                one("Loads that succeed", LOADS_THAT_SUCCEED, unit="percentunit"),
                one(
                    "Failed loads by error",
                    sum_of("error", "lorafleet_adapter_load_failures_total"),
                    "{{error}}",
                    "ops",
                ),
                one("Evictions", sum_of("tier", "lorafleet_engine_lora_evictions_total"), "from {{tier}}", "ops"),
                one(
                    "Bytes by tier",
                    f"sum by (tier) (lorafleet_engine_lora_bytes{{{JOB}}})",
                    "{{tier}}",
                    "bytes",
                ),
                Panel(
                    "Disk caches of the nodes",
                    (
                        Query(f"lorafleet_adapter_cache_bytes{{{JOB}}}", "{{replica}}"),
                        Query(f"lorafleet_adapter_cache_limit_bytes{{{JOB}}}", "limit of {{replica}}"),
                    ),
                    "bytes",
                ),
            ),
        ),
        PanelRow(
            "Sources and resolvers",
            (
                one(
                    "Fetches",
                    sum_of("source, outcome", "lorafleet_adapter_fetches_total"),
                    "{{source}} {{outcome}}",
                    "ops",
                ),
                one("Fetched", sum_of("source", "lorafleet_adapter_fetched_bytes_total"), "{{source}}", "Bps"),
                one(
                    "Time to fetch p95",
                    quantile(0.95, "lorafleet_adapter_fetch_seconds", "source"),
                    "{{source}}",
                    "s",
                ),
                one(
                    "Reads interrupted", sum_of("source", "lorafleet_adapter_fetch_retries_total"), "{{source}}", "ops"
                ),
                one(
                    "Look-ups",
                    sum_of("resolver, outcome", "lorafleet_resolver_lookups_total"),
                    "{{resolver}} {{outcome}}",
                    "ops",
                ),
                one(
                    "Time to answer p95",
                    quantile(0.95, "lorafleet_resolver_seconds", "resolver"),
                    "{{resolver}}",
                    "s",
                ),
            ),
        ),
    ),
    (Variable("model", "model_name", "lorafleet_requests_total"),),
)
