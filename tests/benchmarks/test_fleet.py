import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import fleet
from benchmark_results import read_results
from http_load import Call, Job, Report
from latency import Outcome


class FakeServer:
    """Stands for a server whose counters grow with each look."""

    url = "http://127.0.0.1:1"
    looks = 0.0

    def engine_counters(self) -> dict[str, float]:
        self.looks += 1
        return {"lora_loads_total": 3 * self.looks, "prefix_cache_hits_total": 16 * self.looks}

    def cpu_s(self) -> dict[str, float]:
        return {"EngineReplica": self.looks, "haproxy": 0.5 * self.looks}


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs that were sent. Affinity's answers come in half of the time of others'."""
    asked: list[Job] = []
    started: list[tuple[str, int]] = []

    @contextmanager
    def served(_: object, size: fleet.Size, folder: Path, rule: str, replicas: int) -> Iterator[FakeServer]:
        assert len(list((folder / "adapters").iterdir())) == size.adapters
        started.append((rule, replicas))
        yield FakeServer()

    def run_apart(job: Job) -> Report:
        asked.append(job)
        takes_s = 0.1 if started[-1][0] == "affinity" else 0.2
        outcomes = [Outcome(c.at_s, c.at_s, [c.at_s + takes_s, c.at_s + 2 * takes_s], 2) for c in job.calls]
        return Report(outcomes, 1.0, 10.0)

    monkeypatch.setattr(fleet, "served", served)
    monkeypatch.setattr(fleet, "run_apart", run_apart)
    return asked


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["fleet.py", *words])
    fleet.main()


def test_every_rule_gets_the_same_calls_and_is_compared_with_affinity(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "--duration-s", "5", "--rules", "affinity", "sticky", "--json", str(tmp_path / "fleet.json"))
    half = len(jobs) // 2
    assert half == 5 and jobs[:half] == jobs[half:]
    results = read_results(tmp_path / "fleet.json")
    assert results.figure("ttft_p99", rule="affinity", workload="Dynamo, flash") == pytest.approx(0.1)
    assert results.figure("reads", rule="sticky", workload="conversations") == 3
    assert results.figure("hit_tokens", rule="sticky", workload="conversations") == 16
    assert (results.figure("endless_hit_tokens", rule="sticky", workload="conversations") or 0) > 100
    assert results.figure("front_cores", rule="sticky", workload="saturation") == pytest.approx(0.1)
    assert "Dynamo, flash, 2 replicas: TTFT p99 of affinity is 0.50 x sticky's" in capsys.readouterr().out


def test_a_fleet_gets_load_by_its_size_and_its_throughput_is_compared_with_one_replica_s(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--workloads", "saturation", "--rules", "affinity", "--replicas", "1", "4", "--duration-s", "9")
    run(monkeypatch, *words)
    assert [job.streams for job in jobs] == [4, 16]
    assert len(jobs[1].calls) > 2 * len(jobs[0].calls)
    assert "affinity: 4 replicas generate " in capsys.readouterr().out


def test_the_worst_adapters_are_those_that_wait_longest() -> None:
    calls = [Call(0.0, f"a{i % 10}", [1], 1) for i in range(30)]
    outcomes = [Outcome(0.0, 0.0, [10.0 if call.model == "a3" else 1.0], 1) for call in calls]
    worst = fleet.worst_adapters_s(calls, outcomes)
    assert worst is not None and 1.0 < worst < 10.0
    assert fleet.worst_adapters_s([], []) is None


def test_adapters_have_slora_s_ranks(tmp_path: Path) -> None:
    fleet.write_files("cpu", tmp_path, fleet.Load("", 1.0, 1.0, 8, 0))
    sizes = [(tmp_path / "adapters" / f"a{i}" / "adapter_model.safetensors").stat().st_size for i in range(8)]
    assert len(set(sizes)) == 4
