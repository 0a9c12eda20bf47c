"""A checkpoint's own layer for several tokens (MTP) on a GPU, where captured graphs write features and draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from lorafleet.protocol.engine_config import SpeculativeConfig
from stepped_engine import SteppedEngine
from tests.workers.speculation.drafting import record, speculate
from tests.workers.speculation.mtp_reference import MTPReference, make_mtp_checkpoint

pytestmark = pytest.mark.gpu

LENGTH = 32
CASES = [
    ("qwen3_5", False), ("qwen3_5", True), ("qwen3_5_moe", False), ("glm4_moe", False), ("glm4_moe", True),
    ("deepseek_v3", False),
]  # fmt: skip


@pytest.mark.parametrize(("family", "eager"), CASES)
def test_drafts_are_those_of_a_plain_implementation_and_answers_are_unchanged(
    tmp_path: Path, family: str, eager: bool
) -> None:
    base = make_mtp_checkpoint(tmp_path / "base", family)
    options: dict[str, Any] = {"device": "cuda", "attention_backend": "triton", "enforce_eager": eager, "lora": None}
    prompts = {f"{i}": [5 + (7 * i + j * j) % 300 for j in range(3 + 9 * i)] for i in range(6)}
    found, drafted = [], []
    for config in (None, SpeculativeConfig("mtp")):
        stepped = SteppedEngine(base, speculative_config=config, max_num_seqs=8, dtype="float32", **options)
        if config is not None:
            drafter = stepped.engine.scheduler.speculation.drafter
            record(drafter, drafted)
            speculate(stepped.engine, drafter)
        for name, ids in prompts.items():
            stepped.add(name, ids, params={"max_tokens": LENGTH})
        stepped.until(lambda stepped=stepped: len(stepped.ended) == len(prompts))
        found.append(stepped.tokens)
        stepped.engine.close()
    assert found[0] == found[1]
    checked = [one for one in drafted if one[2]]
    checked = checked[:: max(1, len(checked) // 40)]
    wrong = MTPReference(base, family).wrong(AutoModelForCausalLM.from_pretrained(base), checked)
    assert len(wrong) <= 0.1 * len(checked) and len(checked) > 30  # Nearly equal logits may be ordered differently.
