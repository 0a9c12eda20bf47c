"""The /metrics page of one replica: requests, tokens and latencies measured here, and the engine's own counts.

Names are vLLM's where vLLM has them. Labels are bounded: the endpoint is a route's path; the model is the base, one
of the adapters with the most requests, or "other" (adapter_labels.py). Requests collect their latencies themselves
and record them once at their end, so a token costs next to nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from lorafleet.api.access.work_threads import on_duty
from lorafleet.api.telemetry.adapter_labels import MAX_LABELS, OTHER, AdapterLabels
from lorafleet.api.telemetry.engine_metrics import collect_engine
from lorafleet.protocol.histogram import Bounds, Histogram, buckets, distribution_of
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.protocol.lru_cache import LRUCache
from lorafleet.protocol.messages import AdapterMove, DraftCounts, EngineStats, FinishReason

NO_MODEL = ""  # The request named no model, or one that does not exist.

_LABEL = "lorafleet.model"
_KEPT_SERIES = 10 * MAX_LABELS  # Includes series of adapters that have lost their labels.

_FIRST_TOKEN_S: Bounds = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    30.0,
)
_QUEUE_S: Bounds = (0.001, 0.01, 0.05, 0.1, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BETWEEN_TOKENS_S: Bounds = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
)
_REQUEST_S: Bounds = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0)
_MOVE_S: Bounds = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 100.0)

_DRAFTS = (
    ("vllm:spec_decode_num_drafts", "num_drafts", "Drafts of several tokens that steps have verified."),
    ("vllm:spec_decode_num_draft_tokens", "num_tokens", "Draft tokens that steps have verified."),
    ("vllm:spec_decode_num_accepted_tokens", "num_accepted", "Draft tokens that were right."),
)
_MOVES = (("remote", "disk"), ("disk", "cpu"), ("cpu", "gpu"), ("gpu", "none"), ("cpu", "none"))


def label_request(scope: MutableMapping[str, Any], label: str) -> None:
    """Records in the ASGI scope which model the request named, for the metrics layer around it."""
    scope[_LABEL] = label


def label_of_request(scope: MutableMapping[str, Any]) -> str:
    """Returns the label; empty if the request named no model or an unknown one."""
    return str(scope.get(_LABEL, NO_MODEL))


class Stopwatch:
    """The times of one sequence, in seconds of time.perf_counter(), and its adapter's tier and rank.

    sequence_observer.py fills it in: all but `started` is known from the first token on.
    """

    __slots__ = ("first", "gaps", "last", "lora_rank", "started", "tier")

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.first: float | None = None
        self.last = self.started
        self.gaps: list[float] = []
        self.lora_rank = 0
        self.tier = ""


def text_of(metrics: Sequence[Metric]) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Collected(metrics))
    return generate_latest(registry)


class _Collected(Collector):
    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Sequence[Metric]:
        return self._metrics


class _Series:
    """The counts under one model's label."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()  # by endpoint and status
        self.finished: Counter[str] = Counter()  # sequences, by reason
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.drafts = DraftCounts()
        self.first_token = Histogram(_FIRST_TOKEN_S)
        self.between_tokens = Histogram(_BETWEEN_TOKENS_S)
        self.whole = Histogram(_REQUEST_S)
        self.queue = Histogram(_QUEUE_S)
        self.hits: Counter[str] = Counter()  # sequences, by the tier of their adapter
        self.loads: Counter[str] = Counter()  # by tier
        self.load_seconds: dict[str, float] = {}


class _OfRank:
    """The latencies of sequences whose adapters have ranks of one class."""

    def __init__(self) -> None:
        self.first_token = Histogram(_FIRST_TOKEN_S)
        self.between_tokens = Histogram(_BETWEEN_TOKENS_S)


def rank_class(rank: int) -> int:
    """Returns the rank rounded up to a power of two, because slots and kernels cost as much as for that. The base has
    0."""
    return 0 if rank == 0 else 1 << (rank - 1).bit_length()


class Metrics:
    """The metrics of one replica.

    Args:
        base: Label of the base model.
        replica: Label of this replica; "" if there is only one.
    """

    def __init__(self, stats: Callable[[], EngineStats], base: str, replica: str) -> None:
        self.adapters = AdapterLabels()
        self._stats = stats
        self._base = base
        self._replica = replica
        self._series: LRUCache[str, _Series] = LRUCache(_KEPT_SERIES, lambda label, _: not self._is_shown(label))
        self._others: list[Collector] = []
        self._ranks: dict[int, _OfRank] = {0: _OfRank()}  # by rank_class
        self._moves = {move: Histogram(_MOVE_S) for move in _MOVES}
        self._load_failures: Counter[str] = Counter()  # by error

    def label(self, lora: LoRARequest | None) -> str:
        """Returns the label of a model. None is the base model."""
        return self._base if lora is None else self.adapters.label(lora.lora_name)

    def count_model(self, lora: LoRARequest | None) -> str:
        """Counts one more sequence of a model and returns its label."""
        return self._base if lora is None else self.adapters.count(lora.lora_name)

    def count_request(self, endpoint: str, model: str, status: int) -> None:
        self._of(model).requests[endpoint, str(status)] += 1

    def count_start(self, model: str, queue_s: float, tier: str) -> None:
        """Counts a sequence that has got its first token."""
        series = self._of(model)
        series.queue.observe(queue_s)
        if tier:
            series.hits[tier] += 1

    def count_sequence(
        self, model: str, prompt_tokens: int, generated_tokens: int, watch: Stopwatch, reason: FinishReason
    ) -> None:
        """Counts a sequence that has ended for any reason."""
        series = self._of(model)
        series.prompt_tokens += prompt_tokens
        series.generation_tokens += generated_tokens
        series.finished[reason] += 1
        if watch.first is not None:
            rank = self._ranks.setdefault(rank_class(watch.lora_rank), _OfRank())
            series.first_token.observe(watch.first)
            rank.first_token.observe(watch.first)
            gaps = distribution_of(watch.gaps, _BETWEEN_TOKENS_S)
            series.between_tokens.add(gaps)
            rank.between_tokens.add(gaps)
            series.whole.observe(time.perf_counter() - watch.started)

    def count_drafts(self, model: str, drafts: DraftCounts) -> None:
        """Counts the drafts of a sequence that has ended."""
        self._of(model).drafts += drafts

    def add(self, collector: Collector) -> None:
        """Adds the metrics of another component. It need not know of replicas: the replica's label is added to its
        samples."""
        self._others.append(collector)

    def count_move(self, move: AdapterMove) -> None:
        if move.error:
            self._load_failures[move.error] += 1
            return
        self._moves[move.source, move.target].observe(move.seconds)
        if move.target == "none":
            return
        series = self._of(self.adapters.label(move.lora_name))
        series.loads[move.source] += 1
        series.load_seconds[move.source] = series.load_seconds.get(move.source, 0.0) + move.seconds

    async def render(self) -> bytes:
        """Returns Prometheus' text format. It is written in a thread, because that takes longer than collecting and
        would delay streams."""
        return await on_duty(text_of, list(self.collect()))

    def collect(self) -> Iterator[Metric]:
        yield from collect_engine(self._stats(), self._replica)
        yield from self._of_models()
        yield from self._of_drafts()
        yield from self._of_ranks()
        yield from self._of_moves()
        for collector in self._others:
            yield from map(self._with_replica, collector.collect())

    def _with_replica(self, metric: Metric) -> Metric:
        labeled = Metric(metric.name, metric.documentation, metric.type, metric.unit)
        labeled.samples = [
            s._replace(labels={"replica": self._replica, **s.labels})
            for s in metric.samples
            if not s.name.endswith("_created")  # creation times would double the number of series
        ]
        return labeled

    def _of(self, label: str) -> _Series:
        """Returns the series of a label. Series of adapters without labels are retained for a while; the least
        recently used are dropped."""
        series = self._series.get(label)
        if series is None:
            series = _Series()
            self._series.put(label, series)
        return series

    def _is_shown(self, label: str) -> bool:
        return label in (self._base, OTHER, NO_MODEL) or label in self.adapters.shown

    def _of_models(self) -> Iterator[Metric]:
        labels = ["replica", "model_name"]
        requests = CounterMetricFamily(
            "lorafleet_requests", "HTTP requests answered.", labels=[*labels, "endpoint", "status"]
        )
        finished = CounterMetricFamily(
            "vllm:request_success", "Sequences that have ended.", labels=[*labels, "finished_reason"]
        )
        prompt = CounterMetricFamily("vllm:prompt_tokens", "Prompt tokens.", labels=labels)
        generated = CounterMetricFamily("vllm:generation_tokens", "Tokens in answers.", labels=labels)
        first = HistogramMetricFamily(
            "vllm:time_to_first_token_seconds", "Time from the request to its first token.", labels=labels
        )
        between = HistogramMetricFamily(
            "vllm:inter_token_latency_seconds", "Time between two outputs of a sequence.", labels=labels
        )
        whole = HistogramMetricFamily(
            "vllm:e2e_request_latency_seconds", "Time from the request to a sequence's end.", labels=labels
        )
        queue = HistogramMetricFamily(
            "vllm:request_queue_time_seconds", "Time from a sequence's queueing to its start.", labels=labels
        )
        hits = CounterMetricFamily(
            "lorafleet_adapter_hits",
            "Sequences, by the tier of their adapter when they arrived.",
            labels=[*labels, "tier"],
        )
        loads = SummaryMetricFamily(
            "lorafleet_adapter_load_seconds",
            "Time to move adapters one tier closer to the GPU, by the tier that they came from: remote to the node's "
            "disk, disk to host memory, cpu to a slot.",
            labels=[*labels, "tier"],
        )
        for model, series in self._series.items():
            if not self._is_shown(model):
                continue
            values = [self._replica, model]
            for (endpoint, status), count in series.requests.items():
                requests.add_metric([*values, endpoint, status], count)
            if model == NO_MODEL:
                continue
            for reason, count in series.finished.items():
                finished.add_metric([*values, reason], count)
            prompt.add_metric(values, series.prompt_tokens)
            generated.add_metric(values, series.generation_tokens)
            first.add_metric(values, *buckets(series.first_token.distribution(), _FIRST_TOKEN_S))
            between.add_metric(values, *buckets(series.between_tokens.distribution(), _BETWEEN_TOKENS_S))
            whole.add_metric(values, *buckets(series.whole.distribution(), _REQUEST_S))
            queue.add_metric(values, *buckets(series.queue.distribution(), _QUEUE_S))
            for tier, count in series.hits.items():
                hits.add_metric([*values, tier], count)
            for tier, count in series.loads.items():
                loads.add_metric([*values, tier], count, series.load_seconds[tier])
        yield from (requests, finished, prompt, generated, first, between, whole, queue, hits, loads)

    def _of_drafts(self) -> Iterator[Metric]:
        """Yields the drafts of the models that have had some."""
        drafted = [
            (model, series.drafts)
            for model, series in self._series.items()
            if series.drafts.num_drafts and self._is_shown(model)
        ]
        for name, field, text in _DRAFTS:
            counter = CounterMetricFamily(name, text, labels=["replica", "model_name"])
            for model, drafts in drafted:
                counter.add_metric([self._replica, model], getattr(drafts, field))
            yield counter

    def _of_ranks(self) -> Iterator[Metric]:
        labels = ["replica", "rank"]
        first = HistogramMetricFamily(
            "lorafleet_rank_time_to_first_token_seconds",
            "Time to a request's first token, by the adapter's rank, rounded up to a power of two. 0 is the base.",
            labels=labels,
        )
        between = HistogramMetricFamily(
            "lorafleet_rank_inter_token_latency_seconds",
            "Time between two outputs, by the adapter's rank, rounded up to a power of two. 0 is the base.",
            labels=labels,
        )
        for rank, latencies in sorted(self._ranks.items()):
            values = [self._replica, str(rank)]
            first.add_metric(values, *buckets(latencies.first_token.distribution(), _FIRST_TOKEN_S))
            between.add_metric(values, *buckets(latencies.between_tokens.distribution(), _BETWEEN_TOKENS_S))
        yield from (first, between)

    def _of_moves(self) -> Iterator[Metric]:
        moves = HistogramMetricFamily(
            "lorafleet_adapter_move_seconds",
            "Time of adapters' moves between tiers: remote to disk (fetched), disk to cpu (read, checked, packed), "
            "cpu to gpu (copied into a slot); to none: from the call that drops an adapter until its requests in "
            "flight have released it.",
            labels=["replica", "source", "target"],
        )
        for (source, target), histogram in self._moves.items():
            moves.add_metric([self._replica, source, target], *buckets(histogram.distribution(), _MOVE_S))
        failures = CounterMetricFamily(
            "lorafleet_adapter_load_failures",
            "Adapters that could not be loaded, by error.",
            None,
            ["replica", "error"],
        )
        for error, count in self._load_failures.items():
            failures.add_metric([self._replica, error], count)
        yield from (moves, failures)
