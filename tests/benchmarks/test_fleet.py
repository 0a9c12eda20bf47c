import dataclasses
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import benchmark_results
import fleet
import fleet_figures
import fleet_load
from benchmark_results import Hardware, read_results
from http_load import Call, Job, Report, ReportLost
from latency import Outcome
from measured_page import RECORDED


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
    urls: dict[str, str] = {}

    @contextmanager
    def served(_: object, size: fleet_load.Size, folder: Path, rule: str, __: int) -> Iterator[FakeServer]:
        assert len(list((folder / "adapters").glob("a*"))) == size.adapters
        server = FakeServer()
        server.url = urls.setdefault(rule, f"http://127.0.0.1:1/{rule}")
        yield server

    def run_apart(job: Job) -> Report:
        asked.append(job)
        takes_s = 0.1 if job.base_url == urls.get("affinity") else 0.2
        outcomes = [Outcome(c.at_s, c.at_s, [c.at_s + takes_s, c.at_s + 2 * takes_s], 2) for c in job.calls]
        return Report(outcomes, 1.0, 10.0)

    monkeypatch.setattr(fleet, "served", served)
    monkeypatch.setattr(fleet_figures, "run_apart", run_apart)
    return asked


def of_rule(jobs: list[Job], rule: str) -> list[str]:
    """Returns what was sent to the server of a rule, as text."""
    return [repr(replace(job, base_url="")) for job in jobs if job.base_url.endswith(f"/{rule}")]


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["fleet.py", *words])
    fleet.main()


def test_every_rule_gets_the_same_calls_and_is_compared_with_affinity(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "--duration-s", "5", "--rules", "affinity", "sticky", "--json", str(tmp_path / "fleet.json"))
    ours, sticky = (of_rule(jobs, rule) for rule in ("affinity", "sticky"))
    assert len(ours) == 8 and sorted(ours) == sorted(sticky)
    results = read_results(tmp_path / "fleet.json")
    assert results.figure("ttft_p99", rule="affinity", workload="Dynamo, flash") == pytest.approx(0.1)
    assert results.figure("reads", rule="sticky", workload="conversations") == 3
    assert results.figure("hit_tokens", rule="sticky", workload="conversations") == 16
    assert (results.figure("endless_hit_tokens", rule="sticky", workload="conversations") or 0) > 100
    assert results.figure("front_cores", rule="sticky", workload="saturation") == pytest.approx(0.1)
    assert results.figure("busiest", rule="sticky", workload="saturation") == pytest.approx(1.5)
    shown = "Dynamo, flash, 2 replicas, 1.5 requests/s and replica: TTFT p99 of affinity is 0.50 x sticky's"
    assert shown in capsys.readouterr().out


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
    assert {job.base_url for job in jobs} == {"http://127.0.0.1:1/affinity"}
    assert "saturation, affinity: 4 replicas generate " in capsys.readouterr().out


def test_one_of_several_replicas_can_get_a_closed_loop_at_its_own_port(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--workloads", "saturation", "saturation, one replica", "--rules", "affinity", "--replicas", "4")
    run(monkeypatch, *words, "--warm-up-s", "0")
    all_replicas, one = ("http://127.0.0.1:1/affinity", 4, 12.0), ("http://127.0.0.1:2", 4, 12.0)
    assert [(job.base_url, job.streams, job.seconds) for job in jobs] == [*[all_replicas] * 4, one]
    assert "saturation, affinity: 4 replicas generate " in capsys.readouterr().out


def test_the_rate_can_be_a_share_of_what_the_first_closed_loop_reached(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fleet_figures, "steady_tokens_per_s", lambda *_: 1000.0)
    words = ("--workloads", "saturation", "Dynamo, steady", "--replicas", "1", "--rules", "affinity", "sticky")
    run(monkeypatch, *words, "--load", "0.7", "--warm-up-s", "0", "--json", str(tmp_path / "fleet.json"))
    rates = [case.settings["rate"] for case in read_results(tmp_path / "fleet.json").cases]
    tokens = sum(call.max_tokens for call in jobs[0].calls) / len(jobs[0].calls)
    assert rates == [1.5, rates[1], 1.5, rates[1]] and rates[1] == pytest.approx(700 / tokens, rel=0.1)
    assert len(jobs[1].calls) == pytest.approx(float(rates[1]) * 20, rel=0.3)


def test_a_workload_can_be_for_the_first_rules_alone_and_have_a_rate_of_its_own(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = (
        "--rules",
        "affinity",
        "sticky",
        "--duration-s",
        "3",
        "--warm-up-s",
        "0",
        "--json",
        str(tmp_path / "f.json"),
    )
    run(monkeypatch, *words, "--workloads", "Dynamo, flash", "Dynamo, flash@20", "conversations:1")
    ours, sticky = of_rule(jobs, "affinity"), of_rule(jobs, "sticky")
    assert ours[:2] == sticky and len(ours) == 3
    assert len(jobs[1].calls) > 5 * len(jobs[0].calls)
    rates = [case.settings["rate"] for case in read_results(tmp_path / "f.json").cases]
    assert rates == [1.5, 20.0, 1.5, 1.5, 20.0]


@pytest.mark.parametrize(
    ("workloads", "message"),
    [
        (("saturation:1", "Dynamo, flash"), "would have warmed the caches of the first rules only"),
        (("Dynamo, crowd",), "invalid parse value"),
        (("Dynamo, flash@0",), "invalid parse value"),
        (("Dynamo, flash@99999",), "invalid parse value"),
        (("Dynamo, flash:0",), "invalid parse value"),
    ],
)
def test_workloads_that_would_compare_nothing_are_refused(
    jobs: list[Job],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    workloads: tuple[str, ...],
    message: str,
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "--workloads", *workloads)
    assert message in capsys.readouterr().err and not jobs


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
    assert (tmp_path / "given").read_text() == "http://127.0.0.1:1/sticky http://127.0.0.1:1/sticky,7"
    assert "exit status 3: " in capsys.readouterr().out


def test_servers_that_run_at_once_get_what_others_get_and_the_rest_follows_on_the_first(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--rules", "affinity", "sticky", "round-robin", "--duration-s", "5", "--load", "0.7")
    words += ("--workloads", "saturation", "Dynamo, steady", "conversations:1")
    monkeypatch.setattr(fleet_figures, "steady_tokens_per_s", lambda *_: 100.0)
    run(monkeypatch, *words, "--at-once", "2")
    ours, sticky, turns = (of_rule(jobs, rule) for rule in ("affinity", "sticky", "round-robin"))
    assert sorted(ours[:5]) == sorted(sticky) == sorted(turns) and len(sticky) == 5
    assert len(jobs) == 16 and len(ours) == 6
    rules = [job.base_url.rpartition("/")[2] for job in jobs]
    assert rules[4:] == ["affinity"] * 4 + ["sticky"] * 3 + ["round-robin"] * 5, "sticky has fewer workloads"
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
    assert p99[0] > 2 * p99[1] > 0.0


def test_the_simulation_predicts_first_requests_only_with_a_warm_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ("--simulate", "--json", str(tmp_path / "fleet.json"), "--rules", "affinity", "--device", "cuda")
    words += ("--replicas", "2", "--duration-s", "6", "--rate", "5", "--adapters", "64")
    words += ("--workloads", "Dynamo, steady", "Dynamo, steady@4")
    reads = []
    for warm_up_s in ("0", "3"):
        run(monkeypatch, *words, "--warm-up-s", warm_up_s)
        reads.append([case.figures["reads"] for case in read_results(tmp_path / "fleet.json").cases])
    assert reads[0][0] > 10 and reads[0][1] > 0, "each workload brings adapters that were not requested before"
    assert reads[1][0] < 3 and reads[1][1] == 0


def test_the_simulation_predicts_a_closed_loop_and_loads_on_the_caches_that_it_leaves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    size = dataclasses.replace(fleet_load.SIZES["cuda"], streams=16)
    monkeypatch.setitem(fleet_load.SIZES, "cuda", size)
    words = ("--simulate", "--json", str(tmp_path / "fleet.json"), "--rules", "affinity", "--device", "cuda")
    words += ("--replicas", "2", "--duration-s", "10", "--rate", "8", "--adapters", "16", "--warm-up-s", "0")
    run(monkeypatch, *words, "--workloads", "saturation", "S-LoRA, alpha .3")
    loop, after = read_results(tmp_path / "fleet.json").cases
    assert (loop.figures["tokens_per_s"] or 0.0) > 1.2 * (after.figures["tokens_per_s"] or 0.0) > 0.0
    reads = [case.figures["reads"] or 0.0 for case in (loop, after)]
    assert reads[0] > 10 and reads[1] < 4


def test_the_memory_for_adapters_has_a_default() -> None:
    size = fleet_load.SIZES["cuda"]
    assert fleet_load.lora_bytes(size) == 5 << 30
    assert fleet_load.lora_bytes(dataclasses.replace(size, lora_memory_gib=None)) == 32 * 64 * 84_000_000 // 16


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

    fleet_run_apart = fleet_figures.run_apart
    monkeypatch.setattr(fleet_figures, "run_apart", lose_some)
    words = ("--workloads", "Dynamo, flash", "Dynamo, steady", "--duration-s", "6")
    run(monkeypatch, *words, "--rules", "affinity", "sticky", "round-robin")
    shown = capsys.readouterr().out
    assert "the warm-up of affinity failed, no report" in shown
    assert "failed: Dynamo, steady, sticky, 2 replicas, no report" in shown
    rows = [line.split() for line in shown.splitlines()]
    assert [row[3] for row in rows if row[:1] == ["Dynamo,"]] == ["sticky", "round-robin", "round-robin"]


def test_rules_with_as_many_workloads_get_each_in_turn(jobs: list[Job], monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--rules", "affinity", "sticky", "--duration-s", "3", "--warm-up-s", "0", "--at-once", "2")
    run(monkeypatch, *words, "--workloads", "Dynamo, flash", "Dynamo, steady")
    rules = [job.base_url.rpartition("/")[2] for job in jobs]
    assert rules == ["affinity", "sticky", "affinity", "sticky"]


def test_a_server_whose_adapters_did_not_all_answer_in_time_has_no_rows(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def leave_some_out(job: Job) -> Report:
        report = fleet_run_apart(job)
        if len(jobs) == 1:
            del report.outcomes[20:]
        return report

    fleet_run_apart = fleet_figures.run_apart
    monkeypatch.setattr(fleet_figures, "run_apart", leave_some_out)
    run(monkeypatch, "--workloads", "Dynamo, flash", "--duration-s", "6", "--rules", "affinity")
    assert "the warm-up of affinity failed, 20 of 24 adapters answered within 120 s" in capsys.readouterr().out
    assert len(jobs) == 1


def test_a_server_that_was_not_warmed_up_has_no_rows(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lose_the_first(job: Job) -> Report:
        report = fleet_run_apart(job)
        if len(jobs) == 1:
            raise ReportLost("no report")
        return report

    fleet_run_apart = fleet_figures.run_apart
    monkeypatch.setattr(fleet_figures, "run_apart", lose_the_first)
    words = ("--workloads", "Dynamo, flash", "conversations:1", "--duration-s", "6")
    run(monkeypatch, *words, "--rules", "affinity")
    assert "the warm-up of affinity failed, no report" in capsys.readouterr().out
    assert len(jobs) == 1


def test_rows_with_failed_requests_are_not_compared(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lose_answers(job: Job) -> Report:
        report = fleet_run_apart(job)
        if job.base_url.endswith("sticky") and len(job.calls) != 24:
            report.outcomes[-1].error = "not complete after 60 s"
        return report

    fleet_run_apart = fleet_figures.run_apart
    monkeypatch.setattr(fleet_figures, "run_apart", lose_answers)
    words = ("--workloads", "Dynamo, flash", "--duration-s", "6", "--rules", "affinity", "sticky", "round-robin")
    run(monkeypatch, *words)
    assert len(jobs) == 9
    shown = capsys.readouterr().out
    assert "not compared, since 0 requests of affinity and 1 of sticky failed" in shown
    assert "TTFT p99 of affinity is 0.50 x round-robin's" in shown and "x sticky's" not in shown


def resumed(path: Path, *words: str) -> tuple[str, ...]:
    workloads = ("--workloads", "Dynamo, flash", "Dynamo, steady", "conversations:1")
    return (*workloads, "--duration-s", "6", "--resume", "--json", str(path), *words)


def test_a_run_continues_with_the_rules_that_lack_rows(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(server: FakeServer, *rest: Any) -> Any:
        if server.url.endswith("round-robin") and "Dynamo, steady" in rest:
            raise KeyboardInterrupt
        return fleet_measure(server, *rest)

    words = resumed(tmp_path / "fleet.json", "--rules", "affinity", "sticky", "round-robin")
    fleet_measure = fleet_figures.measure
    monkeypatch.setattr(fleet, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, *words)
    assert len(read_results(tmp_path / "fleet.json").cases) == 3 + 2 + 1
    monkeypatch.setattr(fleet, "measure", fleet_measure)
    jobs.clear()
    run(monkeypatch, *words, "--limit-s", "1000", "--at-once", "2")
    assert {job.base_url.rpartition("/")[2] for job in jobs} == {"round-robin"} and len(jobs) == 4
    shown = capsys.readouterr()
    assert "round-robin has 1 of 2 rows, and is measured again" in shown.err
    assert "Dynamo, steady, 2 replicas, 1.5 requests/s and replica: TTFT p99 of affinity is 0.50 x round" in shown.out
    assert len(read_results(tmp_path / "fleet.json").cases) == 3 + 2 + 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rate", "3"), "was measured with rate=None, and this run has 3.0"),
        (("--server-args", "--max-num-seqs 9"), "was measured with server_args=, and this run has --max-num-seqs 9"),
        (("--adapters", "9"), "was measured with adapters=None, and this run has 9"),
    ],
)
def test_a_run_does_not_continue_what_was_measured_with_other_options(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    run(monkeypatch, *resumed(tmp_path / "fleet.json", "--rules", "affinity"))
    jobs.clear()
    with pytest.raises(SystemExit, match=message):
        run(monkeypatch, *resumed(tmp_path / "fleet.json", "--rules", "affinity", *words))
    assert not jobs


def test_a_run_does_not_continue_on_another_gpu(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run(monkeypatch, *resumed(tmp_path / "fleet.json", "--rules", "affinity"))
    here = benchmark_results.this_hardware()
    monkeypatch.setattr(fleet, "this_hardware", lambda: Hardware(["another GPU"], 2, here.versions))
    jobs.clear()
    with pytest.raises(SystemExit, match="and this machine has \\['another GPU'\\]"):
        run(monkeypatch, *resumed(tmp_path / "fleet.json", "--rules", "affinity"))
    assert not jobs


def test_rules_whose_workloads_do_not_fit_are_left_for_the_next_call(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = resumed(tmp_path / "fleet.json", "--rules", "affinity", "sticky", "--warm-up-s", "2")
    run(monkeypatch, *words, "--limit-s", "18")
    assert "left out: affinity, sticky, 2 replicas; the first need 20 s at least, and 18 s" in capsys.readouterr().out
    run(monkeypatch, *words, "--limit-s", "30", "--at-once", "2")
    assert "the first need 32 s at least" in capsys.readouterr().out and not jobs
    run(monkeypatch, *words, "--limit-s", "30")
    assert {job.base_url.rpartition("/")[2] for job in jobs} == {"affinity", "sticky"}


@pytest.mark.parametrize("words", [(), ("--json", "f", "--load", ".7"), ("--json", "f", "--then", "ls")])
def test_a_run_continues_only_with_a_file_and_a_known_rate(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, "--resume", *words)
    assert not jobs


@pytest.mark.parametrize("path", sorted(RECORDED.glob("*fleet*.json")), ids=lambda path: path.stem)
def test_the_commands_of_the_documentation_are_of_today(path: Path) -> None:
    script, *words = shlex.split(read_results(path).command)[1:]
    assert script == "benchmarks/fleet.py" and fleet.arguments(words).workloads


def test_the_first_pass_over_the_adapters_is_predicted() -> None:
    size = dataclasses.replace(fleet_load.SIZES["cuda"], adapters=256)
    num_bytes, pass_s = fleet_load.first_pass(size, 2)
    assert num_bytes == 256 * 30 * 5_250_000
    assert pass_s == pytest.approx((256 * 0.031 + num_bytes / 1.4e9) / 2)


def test_on_gpus_the_first_pass_is_announced_and_counts_in_what_does_not_fit(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def write_nothing(_: str, folder: Path, load: fleet.Load) -> None:
        for number in range(load.num_adapters):
            (folder / "adapters" / f"a{number}").mkdir(parents=True)

    monkeypatch.setattr(fleet, "write_files", write_nothing)
    words = ("--device", "cuda", "--replicas", "2", "--adapters", "256", "--warm-up-s", "3", "--rules", "affinity")
    words += ("--workloads", "Dynamo, flash", "--duration-s", "6", "--resume", "--json", str(tmp_path / "fleet.json"))
    run(monkeypatch, *words, "--limit-s", "60")
    assert "the first need 67 s at least" in capsys.readouterr().out and not jobs
    run(monkeypatch, *words, "--limit-s", "80")
    assert "affinity: first requests read 40.3 GB each; predicted 18 s" in capsys.readouterr().out and len(jobs) == 3


def test_tokens_of_a_closed_loop_are_counted_between_its_ramp_and_its_end() -> None:
    times = [1.0, 3.0, 5.0, 7.0, 11.0]  # An answer of 10 tokens; the loop's ramp ends at 2 s, the loop at 10 s.
    outcomes = [Outcome(0.0, 0.0, times, 10), Outcome(0.0, 0.0, times, 10, "cut"), Outcome(0.0, 0.0, [], 0)]
    assert fleet_figures.steady_tokens_per_s(outcomes, 10.0) == pytest.approx(10 * 3 / 5 / 8)


def test_the_worst_adapters_are_those_that_wait_longest() -> None:
    calls = [Call(0.0, f"a{i % 10}", [1], 1) for i in range(30)]
    outcomes = [Outcome(0.0, 0.0, [10.0 if call.model == "a3" else 1.0], 1) for call in calls]
    worst = fleet_figures.worst_adapters_s(calls, outcomes)
    assert worst is not None and 1.0 < worst < 10.0
    assert fleet_figures.worst_adapters_s([], []) is None


def test_adapters_have_slora_s_ranks(tmp_path: Path) -> None:
    fleet.write_files("cpu", tmp_path, fleet.Load("", 1.0, 1.0, 8, 0))
    sizes = [(tmp_path / "adapters" / f"a{i}" / "adapter_model.safetensors").stat().st_size for i in range(8)]
    assert len(set(sizes)) == 4
    assert len(list((tmp_path / "adapters").glob("says*"))) == 8
