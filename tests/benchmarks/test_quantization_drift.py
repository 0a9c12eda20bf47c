"""The benchmark of drift: what does not change does not drift, and what is rounded drifts a little."""

from __future__ import annotations

import pytest
import torch

import quantization_drift
from quantization_drift import DEMO, Drift, measure, rounded


def test_only_rounded_weights_drift() -> None:
    drift = Drift(8)
    base, nf4 = (measure(drift, "case", DEMO / "model", method).figures for method in (None, "nf4"))
    assert base["kl"] == base["answer_kl"] == 0 and base["top1_agreement"] == base["answer_top1_agreement"] == 1
    assert base["bytes_per_number"] == 4 and 0.5 < nf4["bytes_per_number"] < 0.6
    assert 0 < nf4["answer_kl"] < nf4["kl"] < 0.1
    assert nf4.keys() == quantization_drift.UNITS.keys()


@pytest.mark.parametrize(("bits", "group", "symmetric"), [(4, 32, True), (4, 32, False), (8, -1, True), (8, 16, False)])
def test_integer_codes_are_the_nearest(bits: int, group: int, symmetric: bool) -> None:
    weight = torch.randn(6, 64)
    codes = rounded(weight, bits, group, symmetric)
    error = (codes.values.float() - weight).abs()
    assert (error <= 0.52 * codes.scale_OG.float()[:, codes.group_D] + 0.002).all()
    assert not symmetric or (codes.zero_OG == 2 ** (bits - 1)).all()
