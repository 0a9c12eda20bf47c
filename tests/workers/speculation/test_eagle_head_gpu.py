"""An EAGLE-3 head on a GPU, where captured graphs write features and draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from lorafleet.protocol.engine_config import SpeculativeConfig
from stepped_engine import SteppedEngine
from tests.workers.speculation.drafting import record, speculate
from tests.workers.speculation.eagle_reference import EagleReference, make_head
from tiny_models import make_model

pytestmark = pytest.mark.gpu

LENGTH = 32


@pytest.mark.parametrize("eager", [False, True])
def test_drafts_are_those_of_a_plain_implementation_and_answers_are_unchanged(tmp_path: Path, eager: bool) -> None:
    base = make_model(tmp_path / "base", "llama3", num_hidden_layers=7, head_dim=32)
    head = make_head(tmp_path / "head")
    options: dict[str, Any] = {"device": "cuda", "attention_backend": "triton", "enforce_eager": eager, "lora": None}
    prompts = {f"{i}": [5 + (7 * i + j * j) % 300 for j in range(3 + 9 * i)] for i in range(6)}
    found, drafted = [], []
    for config in (None, SpeculativeConfig("eagle3", model=str(head))):
        stepped = SteppedEngine(base, speculative_config=config, max_num_seqs=8, **options)
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
    target, reference = AutoModelForCausalLM.from_pretrained(base), EagleReference(head)
    checked = drafted[:: max(1, len(drafted) // 40)]
    right = sum(draft == reference.drafts(target, known, len(draft)) for _, known, draft in checked)
    assert right >= 0.9 * len(checked) > 30  # Nearly equal logits may be ordered differently there.
