import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import fleet
from benchmark_results import read_results
from http_load import Call, Job, Report, ReportLost
from latency import Outcome


class FakeServer:
    """Stands for a server whose counters grow with each look."""

    url = "http://127.0.0.1:1"
    pid = 7
    looks = 0.0

    def engine_counters(self) -> dict[str, float]:
        self.looks += 1
        return {"lora_loads_total": 3 * self.looks, "prefix_cache_hits_total": 16 * self.looks}

    def generated_tokens(self) -> Counter[str]:
        return Counter(r1=30 * round(self.looks), r2=10 * round(self.looks))

    def replica_url(self) -> str:
        return "http://127.0.0.1:2"

    def cpu_s(self) -> dict[str, float]:
        return {"EngineReplica": self.looks, "haproxy": 0.5 * self.looks}


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs that were sent. Affinity's answers come in half of the time of others'."""
    asked: list[Job] = []
    started: list[tuple[str, int]] = []

    @contextmanager
    def served(_: object, size: fleet.Size, folder: Path, rule: str, replicas: int) -> Iterator[FakeServer]:
        assert len(list((folder / "adapters").glob("a*"))) == size.adapters
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
    assert half == 8 and sorted(jobs[:half], key=repr) == sorted(jobs[half:], key=repr)
    results = read_results(tmp_path / "fleet.json")
    assert results.figure("ttft_p99", rule="affinity", workload="Dynamo, flash") == pytest.approx(0.1)
    assert results.figure("reads", rule="sticky", workload="conversations") == 3
    assert results.figure("hit_tokens", rule="sticky", workload="conversations") == 16
    assert (results.figure("endless_hit_tokens", rule="sticky", workload="conversations") or 0) > 100
    assert results.figure("front_cores", rule="sticky", workload="saturation") == pytest.approx(0.1)
    assert results.figure("busiest", rule="sticky", workload="saturation") == pytest.approx(1.5)
    assert "Dynamo, flash, 2 replicas: TTFT p99 of affinity is 0.50 x sticky's" in capsys.readouterr().out


def test_workloads_with_peaks_have_as_many_requests(jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--workloads", "Dynamo, steady", "Dynamo, diurnal", "--rules", "sticky", "--duration-s", "300")
    run(monkeypatch, *words, "--warm-up-s", "0")
    assert len(jobs[1].calls) == pytest.approx(len(jobs[0].calls), rel=0.1)


def test_a_fleet_gets_load_by_its_size_and_its_throughput_is_compared_with_one_replica_s(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--workloads", "saturation", "--rules", "affinity", "--replicas", "1", "4", "--duration-s", "9")
    run(monkeypatch, *words)
    assert [job.streams for job in jobs] == [8, 0, 4, 32, 0, 4, 4, 4, 4], "one client for each replica"
    assert sum(len(job.calls) for job in jobs[5:]) > 2 * len(jobs[2].calls)
    assert all(job.base_url == FakeServer.url for job in jobs)
    assert "saturation, affinity: 4 replicas generate " in capsys.readouterr().out


def test_one_of_several_replicas_can_get_a_closed_loop_at_its_own_port(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--workloads", "saturation", "saturation, one replica", "--rules", "affinity", "--replicas", "4")
    run(monkeypatch, *words, "--warm-up-s", "0")
    all_replicas, one = ("http://127.0.0.1:1", 4, 12.0), ("http://127.0.0.1:2", 4, 12.0)
    assert [(job.base_url, job.streams, job.seconds) for job in jobs] == [*[all_replicas] * 4, one]
    assert "saturation, affinity: 4 replicas generate " in capsys.readouterr().out


def test_the_rate_can_be_a_share_of_what_the_first_closed_loop_reached(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fleet, "steady_tokens_per_s", lambda *_: 1000.0)
    words = ("--workloads", "saturation", "Dynamo, steady", "--replicas", "1", "--rules", "affinity", "sticky")
    run(monkeypatch, *words, "--load", "0.7", "--warm-up-s", "0", "--json", str(tmp_path / "fleet.json"))
    rates = [case.settings["rate"] for case in read_results(tmp_path / "fleet.json").cases]
    tokens = sum(call.max_tokens for call in jobs[0].calls) / len(jobs[0].calls)
    assert rates == [1.5, rates[1], rates[1], rates[1]] and rates[1] == pytest.approx(700 / tokens, rel=0.1)
    assert len(jobs[1].calls) == pytest.approx(float(rates[1]) * 20, rel=0.3)


def test_a_workload_can_be_for_the_first_rule_alone(jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    workloads = ("--workloads", "Dynamo, flash", "conversations", "--once", "conversations")
    run(monkeypatch, *workloads, "--rules", "affinity", "sticky", "--duration-s", "3", "--warm-up-s", "0")
    assert len(jobs) == 3 and jobs[0] == jobs[2]


def test_a_workload_for_the_first_rule_alone_may_not_warm_its_caches_for_the_others(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "--workloads", "saturation", "Dynamo, flash", "--once", "saturation")
    assert "--once must have the last workloads" in capsys.readouterr().err and not jobs


def test_a_closed_loop_of_the_base_has_the_calls_of_the_other_one_without_adapters(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--workloads", "saturation", "saturation, base", "--rules", "affinity", "--replicas", "1")
    run(monkeypatch, *words, "--warm-up-s", "0")
    ours, base = ([(call.prompt, call.max_tokens) for call in job.calls] for job in jobs)
    assert ours == base and {call.model for call in jobs[1].calls} == {"base"}


def test_calls_of_the_warm_up_are_others_and_are_not_counted(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ("--rules", "sticky", "--workloads", "Dynamo, flash", "--json", str(tmp_path / "fleet.json"))
    run(monkeypatch, *words, "--duration-s", "6", "--warm-up-s", "3")
    first, warm, _ = jobs
    assert sorted(call.model for call in first.calls) == sorted(f"a{number}" for number in range(24))
    assert [(len(call.prompt), call.max_tokens) for call in first.calls] == [(1, 1)] * 24
    assert max(call.at_s for call in warm.calls) < 4.0
    assert len(read_results(tmp_path / "fleet.json").cases) == 1


@pytest.mark.usefixtures("jobs")
def test_other_programs_run_on_the_first_server_after_its_workloads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = f"import sys; open('{tmp_path}/given', 'a').write(' '.join(sys.argv[1:])); sys.exit(3)"
    then = ("--then", f'{sys.executable} -c "{program}" {{url}} {{server}}')
    run(monkeypatch, "--rules", "sticky", "affinity", "--workloads", "Dynamo, flash", "--duration-s", "3", *then)
    assert (tmp_path / "given").read_text() == "http://127.0.0.1:1 http://127.0.0.1:1,7"
    assert "exit status 3: " in capsys.readouterr().out


def test_servers_that_run_at_once_get_what_others_get_and_the_rest_follows_on_the_first(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--rules", "affinity", "sticky", "round-robin", "--duration-s", "5", "--load", "0.7")
    words += ("--workloads", "saturation", "Dynamo, steady", "conversations", "--once", "conversations")
    monkeypatch.setattr(fleet, "steady_tokens_per_s", lambda *_: 100.0)
    run(monkeypatch, *words, "--at-once", "2")
    first, second, third = jobs[:5], jobs[5:10], jobs[11:]
    assert first[:2] == second[:2] == third[:2], "the warm-up"
    for job in (*first[2:4], *second[2:4], *third[2:4]):
        assert job.streams == 4
    assert sorted(map(repr, first[2:4])) == sorted(map(repr, second[2:4])) == sorted(map(repr, third[2:4]))
    assert first[4] == second[4] == third[4]
    assert len(jobs) == 16 and len(jobs[10].calls) > 5, "conversations"
    with pytest.raises(SystemExit):
        run(monkeypatch, "--at-once", "0")


def test_the_simulation_predicts_the_same_loads_on_caches_that_earlier_ones_have_filled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ("--simulate", "--json", str(tmp_path / "fleet.json"), "--rules", "affinity", "--device", "cuda")
    loads = ("--replicas", "2", "--duration-s", "6", "--rate", "5", "--workloads", "Dynamo, steady", "conversations")
    p99 = []
    for warm_up_s in ("0", "30"):
        run(monkeypatch, *words, *loads, "--warm-up-s", warm_up_s, "--adapters", "16")
        results = read_results(tmp_path / "fleet.json")
        assert len(results.cases) == 1, "the simulation knows no conversations"
        p99.append(results.figure("ttft_p99", rule="affinity", workload="Dynamo, steady") or 0.0)
    assert p99[0] > 5 * p99[1] > 0.0


def test_the_memory_for_adapters_is_counted_in_adapters_of_mean_rank() -> None:
    size = fleet.SIZES["cuda"]
    assert fleet.num_places(size) == 34
    assert fleet.num_places(dataclasses.replace(size, lora_memory_gib=None)) == round(32 * 64 / 30)


def test_no_workload_begins_after_the_limit(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "--limit-s", "0", "--rules", "sticky")
    assert not jobs
    assert "left out: sticky, 2 replicas" in capsys.readouterr().out


@pytest.mark.usefixtures("jobs")
def test_an_interrupted_run_keeps_the_figures_of_the_cases_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fleet.Run, "_follow", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, "--workloads", "Dynamo, flash", "--duration-s", "3", "--json", str(tmp_path / "fleet.json"))
    assert len(read_results(tmp_path / "fleet.json").cases) == 1


def test_a_report_that_is_lost_costs_its_row_alone(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lose_some(job: Job) -> Report:
        report = fleet_run_apart(job)
        if len(jobs) in (1, 5):  # The warm-up of affinity, and sticky's second workload.
            raise ReportLost("no report")
        return report

    fleet_run_apart = fleet.run_apart
    monkeypatch.setattr(fleet, "run_apart", lose_some)
    words = ("--workloads", "Dynamo, flash", "Dynamo, steady", "--duration-s", "6")
    run(monkeypatch, *words, "--rules", "affinity", "sticky", "round-robin")
    shown = capsys.readouterr().out
    assert "the warm-up of affinity failed, no report" in shown
    assert "failed: Dynamo, steady, sticky, 2 replicas, no report" in shown
    rows = [line.split() for line in shown.splitlines()]
    assert [row[2] for row in rows if row[:1] == ["Dynamo,"]] == ["sticky", "round-robin", "round-robin"]


def test_tokens_of_a_closed_loop_are_counted_between_its_ramp_and_its_end() -> None:
    times = [1.0, 3.0, 5.0, 7.0, 11.0]  # An answer of 10 tokens; the loop's ramp ends at 2 s, the loop at 10 s.
    outcomes = [Outcome(0.0, 0.0, times, 10), Outcome(0.0, 0.0, times, 10, "cut"), Outcome(0.0, 0.0, [], 0)]
    assert fleet.steady_tokens_per_s(outcomes, 10.0) == pytest.approx(10 * 3 / 5 / 8)


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
    assert len(list((tmp_path / "adapters").glob("says*"))) == 8
