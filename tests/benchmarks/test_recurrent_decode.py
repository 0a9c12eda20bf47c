from __future__ import annotations

import sys
from pathlib import Path

import pytest

import families_decode
import recurrent_decode
from benchmark_results import read_results


@pytest.mark.parametrize("shape", recurrent_decode.WITH_ATTENTION)
def test_all_figures_of_a_shape_are_measured_and_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shape: str
) -> None:
    _, _, config = families_decode.FAMILIES[shape]
    sizes = {name: 16 for name, value in config.items() if type(value) is int and value >= 64}
    small = config | sizes | {"vocab_size": 512, "num_experts": 8}
    monkeypatch.setitem(families_decode.FAMILIES, shape, (40, 4, small))
    monkeypatch.setitem(
        recurrent_decode.WITH_ATTENTION, shape, recurrent_decode.WITH_ATTENTION[shape] | {"head_dim": 8}
    )
    for name, value in {"DEVICE": "cpu", "PROMPT": 12, "GENERATED": 4, "ADAPTERS": 2}.items():
        monkeypatch.setattr(families_decode, name, value)
    monkeypatch.setattr(recurrent_decode, "PROMPT", 30)
    file = tmp_path / "results.json"
    options = ["--batches", "1", "3", "--adapted", "3", "--prompts", "4", "--attention-backend", "torch"]
    words = ["--only", shape, *options, "--bandwidth", "4.2", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["recurrent_decode.py", *words])
    recurrent_decode.main()
    one, three, prefill = read_results(file).cases
    assert (one.settings["batch"], three.settings["batch"], prefill.settings) == (1, 3, {"shape": shape})
    assert three.figures.keys() | prefill.figures.keys() == recurrent_decode.UNITS.keys()
    assert one.figures.keys() == three.figures.keys() - {"adapted_ms"}
    for case in (one, three, prefill):
        assert all(value is not None and value > 0 for value in case.figures.values())
