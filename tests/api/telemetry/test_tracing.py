"""Traces as a collector receives them, of an API whose engine answers by script."""

from __future__ import annotations

import importlib.util
import secrets
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from httpx import ASGITransport

from lorafleet.api.app_state import AppState
from lorafleet.api.routes.build_api import build_api
from lorafleet.api.telemetry.traced import ROUTED_HEADER
from lorafleet.api.telemetry.tracing import Tracing
from lorafleet.cluster.config import AppArgs
from lorafleet.cluster.serve.start_checks import check_otel
from lorafleet.protocol.errors import ConfigError
from otlp_receiver import Receiver, receiver


@pytest.fixture
def collector() -> Iterator[Receiver]:
    with receiver() as made:
        yield made


@pytest.fixture
def ratio() -> float:
    return 1.0


@pytest.fixture
def tracing(collector: Receiver, ratio: float) -> Iterator[Tracing]:
    made = Tracing(collector.endpoint, ratio, "replica7")
    yield made
    made.close()


@pytest.fixture
async def http(front: AppState, tracing: Tracing) -> AsyncIterator[httpx.AsyncClient]:
    api = build_api(lambda: front, (), tracing)
    async with httpx.AsyncClient(transport=ASGITransport(api), base_url="http://localhost", timeout=60) as client:
        yield client


def parent(*, sampled: bool = True) -> tuple[str, str, str]:
    """Trace id, span id, and the header that names both."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return trace_id, span_id, f"00-{trace_id}-{span_id}-{'01' if sampled else '00'}"


async def complete(http: httpx.AsyncClient, headers: dict[str, str] | None = None, **fields: object) -> httpx.Response:
    body = {"model": "sql", "prompt": "hello", "max_tokens": 4, "temperature": 0.5, **fields}
    return await http.post("/v1/completions", json=body, headers=headers or {})


async def test_a_request_is_a_span_below_the_clients_own_with_its_parts_below_it(
    http: httpx.AsyncClient, tracing: Tracing, collector: Receiver
) -> None:
    trace_id, span_id, header = parent()
    answer = await complete(http, {"traceparent": header})
    assert answer.status_code == 200, answer.text
    tracing.close()
    whole, parts = collector.trace(trace_id)
    assert (whole.name, whole.parent_id, whole.failed) == ("POST /v1/completions", span_id, False)
    usage = answer.json()["usage"]
    expected = {
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "sql",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.response.id": answer.json()["id"],
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 1,
        "lorafleet.adapter": "sql",
        "lorafleet.adapter.digest": "digest of sql",
    }
    assert whole.attributes.items() >= expected.items()
    assert (whole.resource["service.name"], whole.resource["service.instance.id"]) == ("lorafleet", "replica7")
    assert {part.name for part in parts} == {"find adapter", "queue", "load adapter", "prefill", "decode"}
    of = {part.name: part for part in parts}
    assert of["queue"].attributes["lorafleet.adapter.tier"] == "cpu"
    for name, seconds in (("load adapter", 1), ("queue", 2), ("prefill", 2), ("decode", 3)):
        assert of[name].ended_s - of[name].began_s == pytest.approx(seconds, abs=0.01)
    assert of["prefill"].began_s == pytest.approx(of["queue"].ended_s, abs=0.01)
    assert of["decode"].began_s == pytest.approx(of["prefill"].ended_s, abs=0.01)
    told = str([part.attributes for part in (whole, *parts)])
    assert "hello" not in told and answer.json()["choices"][0]["text"] not in told


async def test_a_stream_has_its_whole_answer_in_its_trace(
    http: httpx.AsyncClient, tracing: Tracing, collector: Receiver
) -> None:
    trace_id, _, header = parent()
    body = {"model": "sql", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "stream": True}
    async with http.stream("POST", "/v1/chat/completions", json=body, headers={"traceparent": header}) as answer:
        assert (await answer.aread()).endswith(b"[DONE]\n\n")
    tracing.close()
    whole, parts = collector.trace(trace_id)
    assert (whole.attributes["gen_ai.operation.name"], whole.attributes["gen_ai.usage.output_tokens"]) == ("chat", 5)
    assert whole.ended_s >= max(part.ended_s for part in parts if part.name == "find adapter")


async def test_samples_have_spans_each_and_count_together(
    http: httpx.AsyncClient, tracing: Tracing, collector: Receiver
) -> None:
    trace_id, _, header = parent()
    answer = (await complete(http, {"traceparent": header}, n=3)).json()
    tracing.close()
    whole, parts = collector.trace(trace_id)
    assert whole.attributes["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"]
    assert whole.attributes["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert sorted(p.attributes["lorafleet.sequence"] for p in parts if p.name == "decode") == [0, 1, 2]


async def test_an_unknown_adapter_is_a_span_of_its_status_and_a_failed_engine_an_error(
    http: httpx.AsyncClient, tracing: Tracing, collector: Receiver, engine
) -> None:
    unknown, _, header = parent()
    assert (await complete(http, {"traceparent": header}, model="nobody")).status_code == 404
    failed, _, other = parent()
    engine.fail_after = 0
    status = (await complete(http, {"traceparent": other})).status_code
    tracing.close()
    whole, parts = collector.trace(unknown)
    assert (whole.attributes["http.response.status_code"], whole.failed) == (404, False)
    [looked] = parts
    assert (looked.name, looked.failed) == ("find adapter", True)
    whole, parts = collector.trace(failed)
    assert (whole.attributes["error.type"], whole.failed) == (str(status), True)
    assert [part.name for part in parts] == ["find adapter", "queue"]
    assert parts[1].attributes["lorafleet.finish_reason"] == "error"


async def test_the_routers_choice_is_a_span_and_what_a_client_makes_up_is_none(
    http: httpx.AsyncClient, tracing: Tracing, collector: Receiver
) -> None:
    ids = []
    for told in ("1700000000000000000 2500000", "17 -3", "x" * 5000, "9" * 30 + " 1"):
        trace_id, _, header = parent()
        ids.append(trace_id)
        assert (await complete(http, {"traceparent": header, ROUTED_HEADER: told})).status_code == 200
    tracing.close()
    _, parts = collector.trace(ids[0])
    [route] = [part for part in parts if part.name == "route"]
    assert route.began_s == pytest.approx(1.7e9) and route.ended_s - route.began_s == pytest.approx(0.0025, abs=1e-3)
    for other in ids[1:]:
        assert "route" not in {part.name for part in collector.trace(other)[1]}


async def test_a_client_that_has_decided_against_a_trace_gets_none(
    http: httpx.AsyncClient, tracing: Tracing, collector: Receiver, engine
) -> None:
    _, _, header = parent(sampled=False)
    assert (await complete(http, {"traceparent": header})).status_code == 200
    assert not engine.requests[-1].traced
    tracing.close()
    assert collector.spans == []


@pytest.mark.parametrize("ratio", [0.0])
async def test_the_ratio_is_of_requests_whose_client_has_not_decided(
    http: httpx.AsyncClient, tracing: Tracing, collector: Receiver, engine
) -> None:
    assert (await complete(http)).status_code == 200
    assert (await complete(http, {"traceparent": "garbage"})).status_code == 200
    assert not any(request.traced for request in engine.requests)
    trace_id, _, header = parent()
    assert (await complete(http, {"traceparent": header})).status_code == 200
    tracing.close()
    collector.trace(trace_id)
    assert {span.trace_id for span in collector.spans} == {trace_id}


async def test_what_changes_nothing_has_no_trace(
    http: httpx.AsyncClient, tracing: Tracing, collector: Receiver
) -> None:
    for path in ("/health", "/metrics", "/v1/models"):
        assert (await http.get(path)).status_code == 200
    tracing.close()
    assert collector.spans == []


def test_without_the_extra_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    args = AppArgs(model="m", otlp_traces_endpoint="http://localhost:4318/v1/traces")
    check_otel(args)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"lorafleet\[otel\]"):
        check_otel(args)
    check_otel(AppArgs(model="m"))
