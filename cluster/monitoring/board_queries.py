"""Provides what the dashboards' queries share: selectors by the variables, rates over Grafana's own interval, and
quantiles."""

from __future__ import annotations

from lorafleet.cluster.monitoring.panels import Kind, Panel, Query

JOB = 'job=~"$job"'
REPLICAS = f'{JOB},replica=~"$replica"'
ADAPTED = f'{REPLICAS},lora="adapter"'
MODELS = f'{JOB},model_name=~"$model"'

TIME_TO_FIRST = "vllm:time_to_first_token_seconds"
BETWEEN = "vllm:inter_token_latency_seconds"
QUEUE = "vllm:request_queue_time_seconds"


def rate(series: str, where: str = JOB) -> str:
    return f"rate({series}{{{where}}}[$__rate_interval])"


def sum_of(by: str, series: str, where: str = JOB) -> str:
    return f"sum by ({by}) ({rate(series, where)})"


def total(series: str, where: str = JOB) -> str:
    return f"sum({rate(series, where)})"


def part(condition: str, series: str, where: str = JOB) -> str:
    """Returns the share of a counter's growth that meets a condition. It is 0, and not missing, until the condition
    is first met."""
    whole = total(series, where)
    return f"({total(series, f'{where},{condition}')} or 0 * {whole}) / {whole}"


def quantile(q: float, histogram: str, by: str = "", where: str = JOB) -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, {sum_of(labels, histogram + '_bucket', where)})"


def quantiles(histogram: str, where: str = JOB) -> tuple[Query, ...]:
    return tuple(Query(quantile(q, histogram, "", where), f"p{q * 100:.0f}") for q in (0.5, 0.9, 0.99))


def one(
    title: str,
    expr: str,
    legend: str = "",
    unit: str = "short",
    kind: Kind = "timeseries",
    width: int = 8,
    text: str = "",
    needs_gpu: bool = False,
) -> Panel:
    return Panel(title, (Query(expr, legend),), unit, kind, width, text, needs_gpu)


def stat(title: str, expr: str, unit: str = "short", text: str = "") -> Panel:
    return one(title, expr, "", unit, "stat", 4, text)


def top(title: str, expr: str, unit: str) -> Panel:
    return one(title, f"topk(10, {expr})", "{{model_name}}", unit)


LOADS_THAT_SUCCEED = (
    f"{total('lorafleet_engine_lora_loads_total')} / ({total('lorafleet_engine_lora_loads_total')} + "
    f"{total('lorafleet_engine_lora_load_failures_total')})"
)
