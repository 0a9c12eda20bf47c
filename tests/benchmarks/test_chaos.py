import asyncio
import itertools
import shutil
import sys
from collections import Counter, namedtuple
from pathlib import Path

import httpx
import pytest

import change_application
import chaos
from chaos import PROMPTS, Clients, Fault, Outcome, Report, filled


def test_a_fault_is_named_by_its_target_and_a_way_or_all_its_ways() -> None:
    assert [str(fault) for fault in Fault.parse("directory")] == ["directory killed", "directory stopped for 8 s"]
    assert Fault.parse("engine-worker:stop") == [Fault("engine-worker", way="stop")]
    assert [str(fault) for fault in Fault.parse("replicas")] == ["replicas one fewer", "replicas one more"]
    for text in ("enginge-worker", "directory:", "directory:pause", "directory:full", "disk:kill"):
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
    line = Report.of(Fault("engine-worker", way="kill"), fault_s, outcomes).line()
    assert line == "| engine-worker killed | 5 | 1 error event, 1 refused | 1.0 | 8.0 | 100, 3000, 200 |"


def test_times_without_answers_have_no_p99() -> None:
    report = Report.of(Fault("directory", way="stop"), 5.0, [Outcome(6.0, 6.5, 7.0, "ok")])
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


def test_a_server_with_other_replicas_is_whole_with_as_many_processes_as_they_have() -> None:
    counts = {"replica-front": 2, "engine-worker": 4, "router": 1}
    fewer = Fault("replicas", "fewer").counts_after(counts)
    assert fewer == {"replica-front": 1, "engine-worker": 2, "router": 1}
    assert Fault("replicas", "more").counts_after(fewer) == counts
    assert Fault("application", "replace").counts_after(counts) == counts
    assert not chaos._is_whole("replica-front", 2, 1), "the drained replica still ends its answers"
    assert chaos._is_whole("router", 2, 1)


def test_a_disk_is_full_for_a_while_and_has_its_room_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(3 << 20))
    with filled(tmp_path):
        (file,) = tmp_path.iterdir()
        assert file.stat().st_size >= 3 << 20
    assert not list(tmp_path.iterdir())


def test_a_disk_with_so_much_room_that_others_may_need_it_is_not_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(33 << 30))
    with pytest.raises(SystemExit, match="33 GiB free, and disk:full fills at most 32"), filled(tmp_path):
        pass
    monkeypatch.setattr(sys, "argv", ["chaos.py", "--only", "disk:full"])
    with pytest.raises(SystemExit):
        chaos.main()


def test_ray_is_found_by_the_command_line_of_the_raylet() -> None:
    words = ["/x/raylet/raylet", "--node_ip_address=127.0.0.1", "--gcs-address=127.0.0.1:6379", "--session-dir=/y"]
    assert change_application.gcs_address(words) == "127.0.0.1:6379"
    with pytest.raises(SystemExit, match="no --gcs-address"):
        change_application.gcs_address(words[:2])


def test_options_are_changed_by_json_or_text_and_replicas_are_counted_within_bounds() -> None:
    changes = change_application.parse_changes(["max_model_len=4096", "routing=sticky", "lora_modules=[]"])
    assert changes == {"max_model_len": 4096, "routing": "sticky", "lora_modules": []}
    assert change_application.parse_count(["3"]) == 3
    with pytest.raises(SystemExit, match="is no OPTION=VALUE"):
        change_application.parse_changes(["routing"])
    for words in ([], ["0"], ["65"], ["-1"], ["1", "2"]):
        with pytest.raises(SystemExit, match="one number of replicas, 1 to 64"):
            change_application.parse_count(words)
