"""The distance between two versions of an adapter is that of their deltas."""

from __future__ import annotations

import pytest
import torch

from lorafleet.tools.drift import relative_change
from lorafleet.tools.plain_lora import PlainLoRA
from lorafleet.tools.reading import read_forms
from tests.tools.conftest import deltas


def test_change_is_of_all_deltas_whatever_ranks_and_targets(base, make_adapter):
    before = make_adapter("before", target_modules=["q_proj", "up_proj"], r=3)
    after = make_adapter("after", target_modules=["q_proj", "v_proj"], r=5, seed=2)
    one, other = (PlainLoRA.from_forms(read_forms(folder, None, "x").forms) for folder in (before, after))
    old, new = deltas(base, before), deltas(base, after)
    squares = sum(((new.get(n, 0) - old.get(n, torch.tensor(0.0))) ** 2).sum() for n in old.keys() | new.keys())
    whole = sum((delta**2).sum() for delta in old.values())
    assert relative_change(one, other) == pytest.approx((squares / whole).sqrt().item(), rel=1e-5)
    assert relative_change(one, one) == pytest.approx(0, abs=1e-7)
