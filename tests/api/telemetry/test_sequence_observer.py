"""One sequence's record: what it holds, and where it goes when the sequence ends."""

from __future__ import annotations

from typing import Any

import pytest

from lorafleet.api.access.access import Access
from lorafleet.api.access.caller import ANONYMOUS, Caller
from lorafleet.api.access.caller_admission import NoQuotas
from lorafleet.api.access.usage import NoMeter, TenantUsage
from lorafleet.api.app_state import AppState
from lorafleet.api.served_model import ServedModel
from lorafleet.api.telemetry.http_metrics import text_of
from lorafleet.api.telemetry.sequence_observer import SequenceObserver
from lorafleet.api.telemetry.sequence_record import SequenceRecord
from lorafleet.api.telemetry.traced import NoTrace
from lorafleet.protocol.errors import AdapterMissing
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.protocol.messages import DraftCounts, TokenOutput


class Sinks(NoQuotas, NoMeter, NoTrace):
    """Everything that is told of a sequence's end, in order."""

    def __init__(self) -> None:
        self.charged: list[int] = []
        self.usages: list[TenantUsage] = []
        self.traced: list[SequenceRecord] = []

    def charge(self, caller: Caller, num_tokens: int) -> None:  # noqa: ARG002
        self.charged.append(num_tokens)

    def add(self, usage: TenantUsage) -> None:
        self.usages.append(usage)

    def sequence_ended(self, record: SequenceRecord) -> None:
        self.traced.append(record)


@pytest.fixture
def sinks() -> Sinks:
    return Sinks()


@pytest.fixture
def observer(front: AppState, sinks: Sinks) -> SequenceObserver:
    language: Any = None
    model = ServedModel("sql", LoRARequest("sql", 1, "/adapters/sql", "d"), language, ANONYMOUS, fetched=True)
    record = SequenceRecord(0, 10, counts_prompt=True)
    made = SequenceObserver(front.telemetry, Access(quotas=sinks, meter=sinks), sinks, "r-0", model, record)
    made.sent()
    return made


def test_a_finished_sequence_is_published_once(observer: SequenceObserver, sinks: Sinks, front: AppState) -> None:
    observer.received(TokenOutput(request_id="r-0", token_ids=[1], tier="disk", lora_rank=8, num_cached_tokens=4))
    observer.received(TokenOutput(request_id="r-0", token_ids=[2, 3]))
    observer.ended("stop", 3)
    observer.ended("abort", 3)
    (usage,) = sinks.usages
    assert (usage.adapter, usage.digest, usage.ended) == ("sql", "d", "stop")
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (10, 4, 3)
    assert sinks.charged == [3] and sinks.traced == [observer.record]
    watch = observer.record.watch
    assert (watch.tier, watch.lora_rank, len(watch.gaps)) == ("remote", 8, 1)
    assert front.telemetry.recent.total(None, of_all=True).generated_tokens == 3


def test_drafts_are_counted_under_the_adapters_name(observer: SequenceObserver, front: AppState) -> None:
    observer.received(TokenOutput(request_id="r-0", token_ids=[1]))
    observer.received(TokenOutput(request_id="r-0", token_ids=[2, 3], drafts=DraftCounts(1, 4, 1)))
    observer.received(TokenOutput(request_id="r-0", token_ids=[4, 5, 6, 7], drafts=DraftCounts(2, 6, 2)))
    observer.ended("stop", 7)
    text = text_of(list(front.telemetry.metrics.collect())).decode()
    for name, count in (("drafts", 3), ("draft_tokens", 10), ("accepted_tokens", 3)):
        assert f'vllm:spec_decode_num_{name}_total{{model_name="sql",replica=""}} {count}.0' in text


def test_a_sequence_that_fails_before_its_first_token_gets_its_prompt_back(
    observer: SequenceObserver, sinks: Sinks, front: AppState
) -> None:
    observer.failed(AdapterMissing("no files"), 0)
    observer.ended("abort", 0)
    assert sinks.charged == [-10]
    assert [(usage.ended, usage.prompt_tokens) for usage in sinks.usages] == [("error", 0)]
    assert front.telemetry.recent.total(None, of_all=True).failed == 1
    assert [failure.code for failure in front.telemetry.failures.of(None, of_all=True)] == ["AdapterMissing"]


def test_an_answer_of_the_base_in_an_adapters_place_names_no_version(
    observer: SequenceObserver, sinks: Sinks, front: AppState
) -> None:
    observer.received(TokenOutput(request_id="r-0", token_ids=[1], fallback_reason="it is broken"))
    observer.ended("length", 1)
    assert [(usage.fell_back, usage.digest) for usage in sinks.usages] == [(True, "")]
    assert [failure.code for failure in front.telemetry.failures.of(None, of_all=True)] == ["FellBackToBase"]
