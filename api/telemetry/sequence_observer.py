"""Observes one sequence, and publishes what it used: in metrics, recent traffic, its trace, quotas and usage."""

from __future__ import annotations

import time

from lorafleet.api.access.access import Access
from lorafleet.api.access.usage import TenantUsage, short_id
from lorafleet.api.served_model import ServedModel
from lorafleet.api.telemetry.http_metrics import Stopwatch
from lorafleet.api.telemetry.sequence_record import SequenceRecord
from lorafleet.api.telemetry.telemetry import Telemetry
from lorafleet.api.telemetry.traced import Trace
from lorafleet.protocol.errors import LorafleetError
from lorafleet.protocol.messages import FinishReason, TokenOutput


class SequenceObserver:
    """Records one sequence from sent() on, and publishes the record once, when the sequence has ended.

    Args:
        request_id: The request's unique name, for the usage record.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        access: Access,
        trace: Trace,
        request_id: str,
        model: ServedModel,
        record: SequenceRecord,
    ) -> None:
        self.record = record
        record.fallback_reason = model.fallback_reason
        self._telemetry = telemetry
        self._access = access
        self._trace = trace
        self._request_id = request_id
        self._model = model
        self._label = telemetry.metrics.count_model(model.lora)
        self._is_published = False

    def sent(self) -> None:
        """Starts the clock, because the sequence goes to the engine now."""
        self.record.watch = Stopwatch()
        self.record.sent_s = time.monotonic()

    def received(self, output: TokenOutput) -> None:
        """Records an output of the engine. It runs once a token, and so does little."""
        record = self.record
        if output.token_ids or output.embedding:
            watch, now_s = record.watch, time.perf_counter()
            if watch.first is None:
                self._started(output)
                watch.first = now_s - watch.started
            else:
                watch.gaps.append(now_s - watch.last)
            watch.last = now_s
        if output.times is not None:
            record.times = output.times
        if output.num_cached_tokens:
            record.num_cached_tokens = output.num_cached_tokens
        if output.drafts is not None:
            record.drafts += output.drafts
        if output.fallback_reason:
            record.fallback_reason = output.fallback_reason
            tenant = self._model.caller.tenant
            self._telemetry.failures.add("FellBackToBase", output.fallback_reason, self._adapter, tenant)

    def failed(self, error: LorafleetError, num_tokens: int) -> None:
        self._telemetry.failures.record(error, self._adapter, self._model.caller.tenant)
        self.ended("error", num_tokens)

    def ended(self, reason: FinishReason, num_tokens: int) -> None:
        """Publishes the record of a sequence that ended for any reason. Only the first call has an effect.

        Args:
            num_tokens: The length of the answer.
        """
        if self._is_published:
            return
        self._is_published = True
        record, caller = self.record, self._model.caller
        record.ended, record.num_tokens = reason, num_tokens
        num_prompt, first_s = record.num_counted_prompt_tokens, record.watch.first
        self._telemetry.metrics.count_sequence(self._label, num_prompt, num_tokens, record.watch, reason)
        self._telemetry.metrics.count_drafts(self._label, record.drafts)
        failed = reason == "error"
        self._telemetry.recent.count(
            caller.tenant, self._adapter, num_prompt, num_tokens, first_s, failed=failed, drafts=record.drafts
        )
        duration_s = record.watch.last - record.watch.started
        self._telemetry.history.count(
            caller.tenant, self._adapter, num_prompt, num_tokens, first_s, duration_s, failed=failed
        )
        self._trace.sequence_ended(record)
        num_unserved = num_prompt if first_s is None else 0  # It was rejected or aborted before it started.
        self._access.quotas.charge(caller, num_tokens - num_unserved)
        self._access.meter.add(self._usage(num_prompt - num_unserved))

    @property
    def _adapter(self) -> str:
        """The adapter's name in the request, or "" for the base model."""
        return self._model.lora.lora_name if self._model.lora is not None else ""

    def _started(self, output: TokenOutput) -> None:
        tier = "remote" if self._model.fetched and output.tier else output.tier
        self.record.watch.lora_rank, self.record.watch.tier = output.lora_rank, tier
        self._telemetry.metrics.count_start(self._label, output.queue_s, tier)

    def _usage(self, num_prompt: int) -> TenantUsage:
        caller, record = self._model.caller, self.record
        fell_back = record.fallback_reason is not None
        return TenantUsage(
            time.time(),
            short_id(self._request_id),
            caller.tenant or "",
            caller.key_id,
            self._adapter,
            "" if self._model.lora is None or fell_back else self._model.lora.digest,
            num_prompt,
            record.num_cached_tokens if num_prompt else 0,
            record.num_tokens,
            record.ended,
            fell_back,
            caller.key_mark,
        )
