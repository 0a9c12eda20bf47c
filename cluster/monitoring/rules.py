"""Defines the Prometheus rules that ship with lorafleet: ratios and quantiles worth recording, and alerts with what
to do.

`lorafleet metrics config DIR` writes them as YAML, and configs/prometheus/ has its output. The thresholds are where
we would want to be woken; whoever runs a cluster edits the file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

RULES_FILE = "lorafleet.rules.yml"
RUNBOOK = "docs/alerts.md"
JOB = 'job=~"lorafleet.*"'


@dataclass(frozen=True, slots=True)
class Record:
    """A recording rule of Prometheus."""

    name: str  # level:metric:operation, as Prometheus' own documentation advises.
    expr: str
    meaning: str
    needs_gpu: bool = False


@dataclass(frozen=True, slots=True)
class Alert:
    """An alerting rule of Prometheus."""

    name: str
    expr: str
    for_: str  # How long the expression must hold.
    severity: str
    summary: str  # One sentence.
    action: str  # One sentence; the runbook says more.

    @property
    def runbook(self) -> str:
        return f"{RUNBOOK}#{self.name.lower()}"


def _quantile(q: float, by: str, metric: str) -> str:
    return f"histogram_quantile({q}, sum by ({by}, le) (rate({metric}_bucket[5m])))"


def _share(by: str, part: str, whole: str) -> str:
    """Returns the share that a part has of a whole. It is 0, and not missing, until the part is first seen."""
    total = f"sum by ({by}) (rate({whole}[5m]))"
    return f"(sum by ({by}) (rate({part}[5m])) or 0 * {total}) / {total}"


RECORDS: tuple[Record, ...] = (
    Record(
        "job_model:lorafleet_requests:rate5m",
        "sum by (job, model_name) (rate(lorafleet_requests_total[5m]))",
        "HTTP requests a second, by adapter.",
    ),
    Record(
        "job:lorafleet_requests_failed:ratio_rate5m",
        _share("job", 'lorafleet_requests_total{status=~"5.."}', "lorafleet_requests_total"),
        "Share of HTTP requests answered with a 5xx.",
    ),
    Record(
        "job:lorafleet_requests_refused:ratio_rate5m",
        _share("job", 'lorafleet_requests_total{status="429"}', "lorafleet_requests_total"),
        "Share of HTTP requests refused for overload.",
    ),
    Record(
        "job_model:lorafleet_sequences_failed:ratio_rate5m",
        _share("job, model_name", 'vllm:request_success_total{finished_reason="error"}', "vllm:request_success_total"),
        "Share of sequences that ended with an error, by adapter; those of streams whose status was 200 too.",
    ),
    Record(
        "job_model:vllm_generation_tokens:rate5m",
        "sum by (job, model_name) (rate(vllm:generation_tokens_total[5m]))",
        "Tokens answered a second, by adapter.",
    ),
    Record(
        "job:vllm_time_to_first_token_seconds:p95_5m",
        _quantile(0.95, "job", "vllm:time_to_first_token_seconds"),
        "Time to first token.",
    ),
    Record(
        "job_model:vllm_time_to_first_token_seconds:p95_5m",
        _quantile(0.95, "job, model_name", "vllm:time_to_first_token_seconds"),
        "Time to first token, by adapter.",
    ),
    Record(
        "job:vllm_inter_token_latency_seconds:p95_5m",
        _quantile(0.95, "job", "vllm:inter_token_latency_seconds"),
        "Between two outputs of a sequence.",
    ),
    Record(
        "job:vllm_request_queue_time_seconds:p95_5m",
        _quantile(0.95, "job", "vllm:request_queue_time_seconds"),
        "Wait in the engine's queue.",
    ),
    Record(
        "job_rank:lorafleet_time_to_first_token_seconds:p95_5m",
        _quantile(0.95, "job, rank", "lorafleet_rank_time_to_first_token_seconds"),
        "Time to first token, by the adapter's rank.",
    ),
    Record(
        "job_rank:lorafleet_inter_token_latency_seconds:p95_5m",
        _quantile(0.95, "job, rank", "lorafleet_rank_inter_token_latency_seconds"),
        "Between two outputs of a sequence, by the adapter's rank.",
    ),
    Record(
        "job_tier:lorafleet_adapter_hits:ratio_rate5m",
        "sum by (job, tier) (rate(lorafleet_adapter_hits_total[5m])) / ignoring (tier) group_left sum by (job) "
        "(rate(lorafleet_adapter_hits_total[5m]))",
        "Hit rate of each tier: share of the adapters' sequences that found theirs there.",
    ),
    Record(
        "job:lorafleet_adapter_load_success:ratio_rate5m",
        "sum by (job) (rate(lorafleet_engine_lora_loads_total[5m])) / (sum by (job) "
        "(rate(lorafleet_engine_lora_loads_total[5m])) + sum by (job) "
        "(rate(lorafleet_engine_lora_load_failures_total[5m])))",
        "Share of the adapter loads that succeeded.",
    ),
    Record(
        "job_source:lorafleet_adapter_fetch_success:ratio_rate5m",
        'sum by (job, source) (rate(lorafleet_adapter_fetches_total{outcome!="failed"}[5m])) / sum by (job, source) '
        "(rate(lorafleet_adapter_fetches_total[5m]))",
        "Share of a source's answers that were no failures.",
    ),
    Record(
        "job_move:lorafleet_adapter_move_seconds:p95_5m",
        _quantile(0.95, "job, source, target", "lorafleet_adapter_move_seconds"),
        "To bring an adapter from one tier to the next, or to drop it.",
    ),
    Record(
        "job_replica:lorafleet_engine_lora_slots_busy:ratio",
        "1 - lorafleet_engine_lora_slots_idle / (lorafleet_engine_lora_slots > 0)",
        "Slot utilization: share of the slots that running sequences need, or that are pinned.",
    ),
    Record(
        "job_replica:lorafleet_engine_busy:ratio_rate5m",
        "sum by (job, replica) (rate(lorafleet_engine_step_seconds_sum[5m]))",
        "Share of the time that the engine spent in steps.",
    ),
    Record(
        "job:vllm_prefix_cache_hits:ratio_rate5m",
        "sum by (job) (rate(vllm:prefix_cache_hits_total[5m])) / sum by (job) "
        "(rate(vllm:prefix_cache_queries_total[5m]))",
        "Share of the prompt tokens that were in the prefix cache.",
    ),
    Record(
        "job:lorafleet_engine_adapter_tokens:ratio_rate5m",
        'sum by (job) (rate(lorafleet_engine_step_tokens_total{lora="adapter"}[5m])) / sum by (job) '
        "(rate(lorafleet_engine_step_tokens_total[5m]))",
        "Share of the computed tokens that used an adapter.",
    ),
    Record(
        "job_kind_tokens:lorafleet_engine_gpu_lora:ratio_rate30m",
        '1 - (sum by (job, kind, tokens) (rate(lorafleet_engine_gpu_step_seconds_sum{lora="base"}[30m])) / '
        'sum by (job, kind, tokens) (rate(lorafleet_engine_gpu_step_seconds_count{lora="base"}[30m]))) / '
        '(sum by (job, kind, tokens) (rate(lorafleet_engine_gpu_step_seconds_sum{lora="adapter"}[30m])) / '
        'sum by (job, kind, tokens) (rate(lorafleet_engine_gpu_step_seconds_count{lora="adapter"}[30m])))',
        "Adapters' share of a step on a GPU: steps with them beside steps of as many tokens without.",
        needs_gpu=True,
    ),
)

ALERTS: tuple[Alert, ...] = (
    Alert(
        "LorafleetDown",
        f"up{{{JOB}}} == 0",
        "1m",
        "critical",
        "{{ $labels.instance }} does not answer Prometheus.",
        "Look whether the server or only its way to Prometheus is gone.",
    ),
    Alert(
        "LorafleetScrapeIncomplete",
        f"lorafleet_scrape_complete{{{JOB}}} == 0",
        "5m",
        "warning",
        "A replica or the adapter directory of {{ $labels.instance }} does not answer the others.",
        "Find which replica is missing, and read its log; Serve replaces what fails its health checks.",
    ),
    Alert(
        "LorafleetEngineSilent",
        f"lorafleet_client_stats_age_seconds{{{JOB}}} > 30 or lorafleet_client_engine_alive{{{JOB}}} == 0",
        "1m",
        "critical",
        "The engine of replica {{ $labels.replica }} has not been heard of.",
        "Read the worker's log; end the worker if it hangs, and Serve starts another replica.",
    ),
    Alert(
        "LorafleetErrors",
        f"job:lorafleet_requests_failed:ratio_rate5m{{{JOB}}} > 0.01",
        "5m",
        "critical",
        "{{ $value | humanizePercentage }} of the requests are answered with a 5xx.",
        "See which adapters and replicas they belong to, and the replicas' logs.",
    ),
    Alert(
        "LorafleetAdapterErrors",
        f"job_model:lorafleet_sequences_failed:ratio_rate5m{{{JOB}}} > 0.1",
        "10m",
        "warning",
        "{{ $value | humanizePercentage }} of the sequences of {{ $labels.model_name }} end with an error.",
        "Ask for the adapter once and read the error; roll it back to the version before.",
    ),
    Alert(
        "LorafleetRefusing",
        f"job:lorafleet_requests_refused:ratio_rate5m{{{JOB}}} > 0.05",
        "10m",
        "warning",
        "{{ $value | humanizePercentage }} of the requests are refused for overload.",
        "Add replicas, or raise max_queued_requests where longer waits are better than refusals.",
    ),
    Alert(
        "LorafleetSlowFirstToken",
        f"job:vllm_time_to_first_token_seconds:p95_5m{{{JOB}}} > 5",
        "10m",
        "warning",
        "One request in twenty waits {{ $value | humanizeDuration }} or longer for its first token.",
        "See whether they wait in the queue, for their adapter, or for long prompts.",
    ),
    Alert(
        "LorafleetQueueing",
        f"job:vllm_request_queue_time_seconds:p95_5m{{{JOB}}} > 2",
        "10m",
        "warning",
        "One request in twenty waits {{ $value | humanizeDuration }} or longer to start.",
        "Add replicas, or slots where requests wait for those.",
    ),
    Alert(
        "LorafleetAdapterLoadsFail",
        f"job:lorafleet_adapter_load_success:ratio_rate5m{{{JOB}}} < 0.9",
        "10m",
        "warning",
        "{{ $value | humanizePercentage }} of the adapter loads succeed.",
        "lorafleet_adapter_load_failures_total says why by error; the replicas' logs name the adapters.",
    ),
    Alert(
        "LorafleetSourceFails",
        f"job_source:lorafleet_adapter_fetch_success:ratio_rate5m{{{JOB}}} < 0.9",
        "10m",
        "warning",
        "{{ $value | humanizePercentage }} of the fetches from {{ $labels.source }} succeed.",
        "Check that the source is reached and its credentials are valid; what is on disk or resident is served on.",
    ),
    Alert(
        "LorafleetSlotsThrash",
        f"sum by (job) (rate(lorafleet_engine_lora_activations_total{{{JOB}}}[15m])) / sum by (job) "
        f"(rate(lorafleet_adapter_hits_total{{{JOB}}}[15m])) > 0.5",
        "15m",
        "warning",
        "Adapters are copied into slots {{ $value | humanize }} times for each sequence.",
        "Raise max_loras, or add replicas so that each serves fewer adapters.",
    ),
    Alert(
        "LorafleetPreempting",
        f"sum by (job, replica) (rate(vllm:num_preemptions_total{{{JOB}}}[10m])) > 0.1",
        "10m",
        "warning",
        "Replica {{ $labels.replica }} gives up {{ $value | humanize }} sequences a second for want of KV blocks.",
        "Lower max_num_seqs, raise gpu_memory_utilization, use kv_cache_dtype=fp8, or add replicas.",
    ),
    Alert(
        "LorafleetPlacementUnsteady",
        f"rate(lorafleet_directory_moves_total{{{JOB}}}[15m]) > 1",
        "30m",
        "warning",
        "Placement gives adapters {{ $value | humanize }} new homes a second.",
        "See whether replicas come and go, or whether the demand is larger than the cluster.",
    ),
    Alert(
        "LorafleetDiskCacheFull",
        f"lorafleet_adapter_cache_bytes{{{JOB}}} / lorafleet_adapter_cache_limit_bytes{{{JOB}}} > 0.95 and on "
        f"(job, instance, replica) rate(lorafleet_adapter_cache_evictions_total{{{JOB}}}[15m]) > 0",
        "15m",
        "warning",
        "The disk cache of replica {{ $labels.replica }}'s node is full, and adapters give way to others.",
        "Raise lora_cache_bytes where the disk has room.",
    ),
    Alert(
        "LorafleetQualityChanged",
        f"lorafleet_quality_agreement{{{JOB}}} < 0.8 or lorafleet_quality_perplexity{{{JOB}}} > 1.1 * "
        f"lorafleet_quality_baseline_perplexity{{{JOB}}}",
        "5m",
        "warning",
        "{{ $labels.model_name }} does not answer its quality probes any more as its baseline did.",
        "Compare the digests in `lorafleet quality show`; accept a version that is meant to differ, or roll it back.",
    ),
)


def to_yaml(records: tuple[Record, ...] = RECORDS, alerts: tuple[Alert, ...] = ALERTS) -> str:
    groups = [
        {"name": "lorafleet-records", "rules": [{"record": one.name, "expr": one.expr} for one in records]},
        {"name": "lorafleet-alerts", "rules": [_alert(one) for one in alerts]},
    ]
    text: str = yaml.safe_dump({"groups": groups}, sort_keys=False, width=118)
    return (
        "# Written by `lorafleet metrics config`; the meaning of each is in docs/metrics.md and docs/alerts.md.\n"
        + text
    )


def _alert(one: Alert) -> dict[str, Any]:
    return {
        "alert": one.name,
        "expr": one.expr,
        "for": one.for_,
        "labels": {"severity": one.severity},
        "annotations": {"summary": one.summary, "action": one.action, "runbook": one.runbook},
    }
