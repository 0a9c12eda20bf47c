from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import fleet_figures
import measured_page
from benchmark_results import Case, Hardware, Results

H200 = Hardware(["NVIDIA H200"], 16, {"torch": "2.11", "triton": "3.6"})
ENGINE = Results(
    "engine_e2e",
    "python benchmarks/engine_e2e.py",
    "2026-01-02",
    H200,
    {"step_ms": "ms", "prefill_tokens_per_s": "tokens/s", "floor_ms": "ms"},
    [
        Case(
            {"batch": 1, "adapters": adapters},
            {"step_ms": 1.234 + adapters, "prefill_tokens_per_s": 45_600, "floor_ms": 0.5},
        )
        for adapters in (0, 8, 64)
    ],
)
VLLM = msgspec.structs.replace(ENGINE, cases=[Case({"batch": 1, "adapters": 0}, {"step_ms": 10.5})])
PAGE = """before
<!-- figures: engine -->
by hand
<!-- end of figures -->
between
<!-- figures: sampling -->
by hand
<!-- end of figures -->
"""


def test_the_tables_of_the_page_are_those_of_the_recorded_results() -> None:
    text, files = measured_page.PAGE.read_text(), measured_page.recorded()
    assert measured_page.page(text, files) == text, "run python benchmarks/measured_page.py"


def test_the_charts_have_the_recorded_figures() -> None:
    for chart, figures in measured_page.bars(measured_page.recorded()).items():
        text = (measured_page.CHARTS / f"{chart}.csv").read_text()
        rewritten = measured_page.chart_figures(text, figures)
        assert rewritten == text, "run python benchmarks/measured_page.py"


def test_each_table_has_its_place_on_the_page() -> None:
    names = [match[1] for match in measured_page.BLOCK.finditer(measured_page.PAGE.read_text())]
    assert sorted(names) == sorted(measured_page.TABLES)


def test_a_table_is_written_once_its_results_are_recorded() -> None:
    page = measured_page.page(PAGE, {"engine_e2e": ENGINE, "vllm_e2e": VLLM})
    assert page == PAGE.replace(
        "by hand\n",
        "Command: `python benchmarks/engine_e2e.py`, NVIDIA H200, torch 2.11, triton 3.6, 2026-01-02.\n\n"
        "| batch | base | vLLM | 8 adapters | vLLM | 64 slots, up to 64 adapters | vLLM |\n"
        "|---|---|---|---|---|---|---|\n"
        "| 1 | 1.23 (46k) | 10.5 | 9.23 (46k) | | 65.23 (46k) | |\n",
        1,
    )
    assert measured_page.page(PAGE, {"engine_e2e": ENGINE}) == PAGE, "the peer's figures are missing"


def test_bars_of_others_stay_as_they_are() -> None:
    text = "panel,group,series,value\nbase model,1,lorafleet,4.73\nbase model,1,vLLM 0.26,4.97\n"
    figures = measured_page.bars({"engine_e2e": ENGINE})["step_time"]
    assert measured_page.chart_figures(text, figures) == text.replace("4.73", "1.23")


def test_results_of_every_new_table_are_rendered() -> None:
    latencies = {f"{what}_{p}_ms": 1.0 for what in ("ttft", "gap") for p in ("p50", "p99")}
    saturated = Case(
        {"streams": 64, "adapters": 0, "kv_cache_dtype": "auto"},
        {"tokens_per_s": 5000.4, "preemptions": 0, "overlapped": 0.99, **latencies},
    )
    over_http = {"tokens_per_s": 5000.4, "token_mean_ms": 6.5, "client_cores": 0.04, **latencies, "ttft_p50_ms": None}
    loads = [{"streams": 64, "adapters": 0}, {"rate": 5.0, "adapters": 8}]
    ours, theirs = ([Case({"server": name, **load}, over_http) for load in loads] for name in ("ours", "theirs"))
    long = [
        Case({"context": 32768, "kind": "prefill"}, {"prefill_tokens_per_s": 30_000}),
        Case({"context": 32768, "kind": "decode", "sequences": 8}, {"step_ms": 9.0}),
        Case({"context": 32768, "kind": "amid streams"}, {"relative_speed": 0.7, "gap_p50_ms": 20.0}),
    ]
    cases_of = {"saturation": [saturated], "saturation_fp8": [saturated], "long_context": long}
    cases_of |= {"side_by_side": ours, "side_by_side_vllm": theirs}
    files = {name: msgspec.structs.replace(ENGINE, cases=cases) for name, cases in cases_of.items()}
    assert measured_page.saturation_table(files).splitlines()[2] == (
        "| 64 | 0 | bf16 | 5000 | 1 / 1 | 1.0 / 1.0 | 0 | 99 % |"
    )
    assert "| amid streams: share of that speed | 0.70 |" in measured_page.long_context_table(files)
    assert measured_page.side_by_side_table(files).splitlines()[2:] == [
        f"| {server} | {load} | {adapters} | 5000 | | 1.0 / 1.0 | 6.50 | 0.04 |"
        for load, adapters in (("64 streams", 0), ("5 requests/s", 8))
        for server in ("ours", "theirs")
    ]


def test_rows_of_a_fleet_stand_beside_what_was_predicted_of_them() -> None:
    settings = {"workload": "Dynamo, flash", "rule": "sticky", "replicas": 4, "rate": 17.5}
    figures = dict.fromkeys(fleet_figures.UNITS, 0.25) | {"hit_tokens": 45.0, "endless_hit_tokens": 50.0, "failed": 0}
    predicted = dict.fromkeys(fleet_figures.UNITS) | {"ttft_p99": 0.4}
    files = {
        "fleet": msgspec.structs.replace(ENGINE, cases=[Case(settings, figures)]),
        "fleet_more": msgspec.structs.replace(
            ENGINE, cases=[Case(settings | other, figures) for other in ({"rule": "round-robin"}, {"replicas": 2})]
        ),
        "simulated_fleet_two": msgspec.structs.replace(ENGINE, cases=[Case(settings | {"replicas": 2}, figures)]),
        "simulated_fleet": msgspec.structs.replace(
            ENGINE, cases=[Case(settings | {"rate": 18.0}, figures), Case(settings, predicted)]
        ),
    }
    shared = "250 | 250.0 / 250.0 | 0 | 0 | 0 | 90 % | 0.25 / 0.25 | 0.25 |"
    assert measured_page.fleet_table(files).splitlines()[2:] == [
        f"| Dynamo, flash | sticky | 4 | 17.5 | 250 / 250 | 400 | {shared}",
        f"| Dynamo, flash | round-robin | 4 | 17.5 | 250 / 250 | | {shared}",
        f"| Dynamo, flash | sticky | 2 | 17.5 | 250 / 250 | 250 | {shared}",
    ]


def test_only_results_of_gpus_that_the_page_shows_are_adopted(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    for name in ("engine_e2e", "side_by_side_vllm", "engine_e2e_mixed", "vllm_e2e"):
        (source / f"{name}.json").write_bytes(msgspec.json.encode(ENGINE))
    assert measured_page.adopt(source, target) == ["engine_e2e", "side_by_side_vllm"]
    assert measured_page.recorded(target)["engine_e2e"] == ENGINE
    cpu = msgspec.structs.replace(ENGINE, hardware=Hardware([], 2, {}))
    (source / "sampling.json").write_bytes(msgspec.json.encode(cpu))
    for name in ("simulated_fleet", "simulated_fleet_two"):
        (source / f"{name}.json").write_bytes(msgspec.json.encode(cpu))
    with pytest.raises(SystemExit, match=r"sampling\.json was measured without a GPU"):
        measured_page.adopt(source, target)
    (source / "sampling.json").unlink()
    assert measured_page.adopt(source, target)[2:] == ["simulated_fleet", "simulated_fleet_two"]
