"""Runs the benchmarks of the engine with small shapes on the CPU: they work, and they record all their figures."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import ModuleType

import pytest

import engine_setup
import long_context
import sampling
import saturation
import speculative
import speculative_load
from benchmark_results import Results, read_results
from lorafleet.workers.speculation.step_pace import StepPace

SMALL = ("--device", "cpu", "--layers", "1", "--hidden", "64", "--vocabulary", "512")
ONE_THREAD = ("--engine-option", "cpu_threads=1")


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, benchmark: ModuleType, *words: str) -> Results:
    file = tmp_path / "results.json"
    monkeypatch.setattr(sys, "argv", [f"{benchmark.__name__}.py", *SMALL, *words, "--json", str(file)])
    benchmark.main()
    results = read_results(file)
    assert results.benchmark == benchmark.__name__
    assert "--json" not in results.command
    return results


def test_saturation_keeps_all_streams_busy_until_enough_requests_have_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ("--streams", "2", "4", "--adapters", "0", "3", "--prompt", "16", "--generated", "8", "--requests", "8")
    results = run(monkeypatch, tmp_path, saturation, *words, "--seconds", "60", *ONE_THREAD)
    assert [(case.settings["adapters"], case.settings["streams"]) for case in results.cases] == [
        *((0, 2), (0, 4), (3, 2), (3, 4))
    ]
    for case in results.cases:
        figures = case.figures
        assert figures.keys() == saturation.UNITS.keys()
        assert figures["requests"] in range(8, 8 + 4)
        assert figures["tokens_per_s"] * figures["seconds"] >= 8 * 4, "nearly all of the answers' tokens"
        assert figures["waves"] >= 1, "the load is steady before it is measured"
        assert figures["preemptions"] == 0
        assert 0 < figures["gap_p50_ms"] <= figures["gap_p99_ms"]
        assert 0 < figures["ttft_p50_ms"] <= figures["ttft_p99_ms"]


def test_long_context_measures_prefill_decode_and_a_prompt_amid_streams(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ("--contexts", "300", "--sequences", "1", "2", "99", "--most-tokens", "900", "--steps", "2")
    results = run(monkeypatch, tmp_path, long_context, *words, "--streams", "2", "--seconds", "0.01", *ONE_THREAD)
    kinds = [(case.settings["kind"], case.settings.get("sequences")) for case in results.cases]
    assert kinds == [("prefill", None), ("decode", 1), ("decode", 2), ("decode", 3), ("amid streams", None)]
    figures = results.cases[-1].figures
    alone_s = results.figure("prefill_s", kind="prefill")
    assert alone_s is not None
    assert figures["relative_speed"] == pytest.approx(alone_s / figures["first_token_s"])
    assert 0 < figures["gap_p50_ms"] <= figures["gap_p99_ms"] <= figures["gap_max_ms"]


def test_a_load_that_is_measured_before_it_is_steady_is_recorded_as_such(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ("--streams", "4", "--prompt", "16", "--generated", "8", "--requests", "8", "--fill-seconds", "0")
    results = run(monkeypatch, tmp_path, saturation, *words, *ONE_THREAD)
    assert results.cases[0].figures["waves"] < 1


def test_long_context_without_decodes_measures_what_the_goals_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ("--contexts", "300", "--streams", "2", "--seconds", "0.01", "--without-decodes")
    results = run(monkeypatch, tmp_path, long_context, *words, *ONE_THREAD)
    assert [case.settings["kind"] for case in results.cases] == ["prefill", "amid streams"]


def test_sampling_records_every_case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results = run(
        monkeypatch,
        tmp_path,
        sampling,
        *("--vocabulary", "2000", "--batches", "2", "--history", "10", "--generated", "6"),
    )
    assert [case.settings["case"] for case in results.cases] == list(sampling.CASES)
    assert all((case.figures["step_ms"] or 0) > 0 for case in results.cases)


@pytest.mark.parametrize("option", ["max_num_mixed=1", "lora.max_loras=1"])
def test_an_option_that_the_engine_does_not_have_is_refused(option: str, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    engine_setup.add_engine_arguments(parser)
    args = parser.parse_args([*SMALL, "--engine-option", option])
    with pytest.raises(SystemExit, match=option):
        engine_setup.make_engine(tmp_path, args, 1, 64)


def test_options_reach_the_engine_and_its_adapters(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    engine_setup.add_engine_arguments(parser)
    options = ["block_size=32", "lora.max_loras=5", "attention_backend=torch", "lora.max_cpu_loras=6"]
    args = parser.parse_args([*SMALL, "--engine-option", *options])
    engine, loras = engine_setup.make_engine(tmp_path, args, 1, 64, num_adapters=2)
    try:
        assert len(loras) == 2
        assert engine.scheduler.kv.block_size == 32
        assert engine.stats().lora_in_use_limit == 5
    finally:
        engine.close()


def test_speculative_compares_drafts_of_each_kind_with_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = ("--batches", "1", "3", "--adapters", "2", "--right", "0.5", "--prompt", "16", "--tokens", "24")
    results = run(monkeypatch, tmp_path, speculative, *words, "--repeats", "1", *ONE_THREAD)
    settings = [(case.settings["batch"], case.settings["drafts"]) for case in results.cases]
    assert settings == [(1, "ngram"), (1, "0.5"), (3, "ngram"), (3, "0.5")]
    for case in results.cases:
        assert case.figures.keys() == speculative.UNITS.keys()
        assert case.figures["ratio"] == pytest.approx(case.figures["tokens_per_s"] / case.figures["plain_tokens_per_s"])
    assert results.figure("accepted", batch=1, drafts="ngram") == 1, "the answer is one token again and again"
    assert 0 < (results.figure("drafted", batch=1, drafts="ngram") or 0.0) < 1, (
        "each generated token had one draft at most"
    )


def test_speculative_has_the_cost_of_a_draft_model_in_the_arms_of_known_quality(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(StepPace, "is_faster", lambda *_: True)  # however fast the machine is
    words = ("--batches", "2", "--right", "1", "--prompt", "16", "--tokens", "24", "--draft-layers", "1")
    results = run(monkeypatch, tmp_path, speculative, *words, "--draft-hidden", "128", "--repeats", "1", *ONE_THREAD)
    assert results.figure("accepted", batch=2, drafts="1.0") == 1


def test_speculative_has_the_cost_of_a_head(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(StepPace, "is_faster", lambda *_: True)
    words = ("--batches", "2", "--right", "1", "--prompt", "16", "--tokens", "24", "--draft-head", "--layers", "7")
    results = run(monkeypatch, tmp_path, speculative, *words, "--hidden", "128", "--repeats", "1", *ONE_THREAD)
    assert results.figure("accepted", batch=2, drafts="1.0") == 1


def test_a_moving_load_is_measured_in_each_stage_and_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ("--streams", "1", "3", "1", "--adapters", "2", "--right", "0.5", "--prompt", "16", "--tokens", "8")
    results = run(monkeypatch, tmp_path, speculative_load, *words, "--repeats", "1", *ONE_THREAD)
    stages = [(case.settings["drafts"], case.settings["streams"]) for case in results.cases]
    assert stages == [(drafts, streams) for drafts in ("0.5", "none") for streams in (1, 3, 1, "all")]
    for case in results.cases:
        assert case.figures.keys() == speculative_load.UNITS.keys()
        assert case.figures["ratio"] == pytest.approx(case.figures["tokens_per_s"] / case.figures["plain_tokens_per_s"])
