"""Values that are finite in the file and not once they are computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import IA3Config

from lorafleet.protocol.errors import AdapterMalformed
from tests.workers.adapters.kinds.harness import make, read


def test_a_norm_that_overflows_once_it_is_scaled_is_refused(tmp_path: Path) -> None:
    config = IA3Config(target_modules=["lm_head"], feedforward_modules=["lm_head"])
    adapter = make(tmp_path / "a", "llama", config)
    assert read(adapter).norms["norm"].isfinite().all()
    adapter.map(lambda k, v: (k, torch.full_like(v, 3e38)))
    with pytest.raises(AdapterMalformed, match=r"norm has computed values that overflow torch.float32"):
        read(adapter)
