import asyncio
import itertools
from collections import Counter

import httpx
import pytest

from chaos import PROMPTS, Clients, Fault, Outcome, Report


def test_a_fault_is_named_by_its_process_and_a_way_or_both_ways() -> None:
    assert [str(fault) for fault in Fault.parse("directory")] == ["directory killed", "directory stopped for 8 s"]
    assert Fault.parse("engine-worker:stop") == [Fault("engine-worker", is_stop=True)]
    for text in ("enginge-worker", "directory:", "directory:pause"):
        with pytest.raises(SystemExit, match="is not a fault"):
            Fault.parse(text)


def test_a_report_counts_failures_after_the_fault_and_compares_the_wait_before_it_and_later() -> None:
    fault_s = 100.0
    outcomes = [
        Outcome(90.0, 90.1, 91.0, "ok"),
        Outcome(99.0, 107.0, 108.0, "ok"),
        Outcome(99.5, 99.6, 100.5, "error event"),
        Outcome(101.0, 104.0, 105.0, "ok"),
        Outcome(101.0, None, 101.1, "refused"),
        Outcome(111.0, 111.2, 112.0, "ok"),
    ]
    line = Report.of(Fault("engine-worker", is_stop=False), fault_s, outcomes).line()
    assert line == "| engine-worker killed | 5 | 1 error event, 1 refused | 1.0 | 8.0 | 100, 3000, 200 |"


def test_times_without_answers_have_no_p99() -> None:
    report = Report.of(Fault("directory", is_stop=True), 5.0, [Outcome(6.0, 6.5, 7.0, "ok")])
    assert report.line().endswith("| none | 0.0 | 0.5 | -, 500, - |")


def test_requests_whose_answers_vary_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = Counter[tuple[str, str]]()

    async def answer(_clients: Clients, _http: httpx.AsyncClient, model: str, prompt: str) -> str:
        asked[model, prompt] += 1
        return str(asked[model, prompt] % 4) if (model, prompt) == ("torn", PROMPTS[1]) else model

    monkeypatch.setattr(Clients, "_answer", answer)
    clients = Clients("http://127.0.0.1:1", ["sure", "torn"])
    asyncio.run(clients.learn())
    assert clients.expected == {
        (model, prompt): model
        for model in ("sure", "torn")
        for prompt in PROMPTS
        if (model, prompt) != ("torn", PROMPTS[1])
    }
    assert "left out" in capsys.readouterr().out


def test_without_any_request_whose_answer_stays_the_same_nothing_is_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count()

    async def answer(_clients: Clients, _http: httpx.AsyncClient, _model: str, _prompt: str) -> str:
        return str(next(numbers))

    monkeypatch.setattr(Clients, "_answer", answer)
    with pytest.raises(SystemExit, match="no request to torn has the same answer each time"):
        asyncio.run(Clients("http://127.0.0.1:1", ["torn"]).learn())
