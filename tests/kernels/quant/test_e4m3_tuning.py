from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from lorafleet.kernels.quant import e4m3_tuning
from lorafleet.kernels.quant.e4m3_tuning import E4M3Limits, E4M3Shape, E4M3Tuning, class_name, default_shape


def test_activations_of_a_weight_only_scheme_are_never_rounded() -> None:
    limits = E4M3Limits(exact_tokens=8, rounded_tokens=64, pair_tokens=100)
    assert limits.of_scheme(rounds_x=True) == (8, 64)
    exact_tokens, pair_tokens = limits.of_scheme(rounds_x=False)
    assert exact_tokens == pair_tokens == 100


def test_a_batch_has_the_shape_of_its_class_or_the_default() -> None:
    measured = E4M3Shape(64, 16, stages=8, warps=4, programs=528)
    tuning = E4M3Tuning(E4M3Limits(), {"16 tokens, wide, exact": measured})
    assert tuning.shape(9, 28672, rounds_x=False) == tuning.shape(16, 28672, rounds_x=False) == measured
    for tokens, outputs, rounds_x in ((17, 28672, False), (9, 4096, False), (9, 28672, True)):
        assert tuning.shape(tokens, outputs, rounds_x) == default_shape(tokens, rounds_x)
    assert class_name(1000, 4096, True) == "256 tokens, narrow, rounded"


def test_a_saved_file_is_read_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(e4m3_tuning, "FOLDER", tmp_path / "tuned")
    tuning = E4M3Tuning(E4M3Limits(16, 64, 32), {"16 tokens, wide, exact": E4M3Shape(64, 16, 8, 4, True, 132)})
    path = e4m3_tuning.save("A GPU/2", tuning)
    assert path.name == "A_GPU_2.json"
    assert E4M3Tuning.of(json.loads(path.read_text())) == tuning
    assert asdict(tuning)["limits"]["pair_tokens"] == 32


def test_every_shipped_file_is_valid() -> None:
    for path in e4m3_tuning.FOLDER.glob("*.json"):
        tuning = E4M3Tuning.of(json.loads(path.read_text()))
        names = {
            class_name(tokens, outputs, rounds_x)
            for tokens in e4m3_tuning.TOKEN_CLASSES
            for outputs in (1, e4m3_tuning.WIDE_OUTPUTS)
            for rounds_x in (False, True)
        }
        assert set(tuning.shapes) <= names, path


def test_a_cpu_has_no_tuning() -> None:
    assert e4m3_tuning.e4m3_tuning(torch.device("cpu")) == E4M3Tuning()


@pytest.mark.parametrize("tokens", [1, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("rounds_x", [False, True])
def test_the_tuner_tries_shapes_that_fit_the_batch(tokens: int, rounds_x: bool) -> None:
    pytest.importorskip("triton")
    from lorafleet.kernels.quant.tune_e4m3 import candidates

    default = default_shape(tokens, rounds_x)
    tried = candidates(default, tokens, rounds_x)
    assert default in tried and len(set(tried)) > 5
    assert all(shape.block_t < 2 * max(16, tokens) for shape in tried)
    assert not (rounds_x and any(shape.splits_inside for shape in tried))


def test_activations_are_rounded_only_where_that_saves_a_tenth_of_the_time() -> None:
    pytest.importorskip("triton")
    from lorafleet.kernels.quant.tune_e4m3 import limits_of

    times = {
        16: {"exact": 2.2, "rounded": 2.08, "row-wise": 2.9, "plain": 8.0},
        32: {"exact": 2.3, "rounded": 2.1, "row-wise": 3.0, "plain": 8.0},
        64: {"exact": 3.1, "rounded": 2.3, "row-wise": 3.4, "plain": 8.0},
        128: {"exact": 9.0, "rounded": 4.0, "row-wise": 3.9, "plain": 8.0},
    }
    assert limits_of(times) == E4M3Limits(exact_tokens=32, rounded_tokens=64, pair_tokens=64)
    assert limits_of({16: {"exact": 2.2, "rounded": 1.9, "row-wise": 2.9, "plain": 8.0}}).exact_tokens == 0
