"""Drafts of a model follow a step in flight, so that steps with drafts overlap. No answer changes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lorafleet.protocol.engine_config import SpeculativeConfig
from lorafleet.workers.speculation.model_drafter import ModelDrafter
from stepped_engine import SteppedEngine
from tests.workers.speculation.drafting import speculate

LENGTH = 40


class Drafting:
    """An engine with a draft model, and what it has drafted."""

    def __init__(self, base: Path, draft: Path, **options: Any) -> None:
        config = SpeculativeConfig("draft_model", model=str(draft))
        self.stepped = SteppedEngine(base, **({"speculative_config": config, "async_scheduling": True} | options))
        speculation = self.stepped.engine.scheduler.speculation
        assert speculation is not None and isinstance(speculation.drafter, ModelDrafter)
        self.drafter = speculation.drafter
        speculate(self.stepped.engine, self.drafter)
        self.behind = 0  # Tokens that were drafted behind a step in flight.
        self.accepted = self.drafted = 0
        propose, step = self.drafter.propose_behind, self.stepped.engine.step

        def proposed(*args: Any) -> Any:
            made = propose(*args)
            self.behind += sum(made.counts.values())
            return made

        def stepped() -> Any:
            outputs = step()
            for output in outputs:
                if output.drafts is not None:
                    self.drafted += output.drafts.num_tokens
                    self.accepted += output.drafts.num_accepted
            return outputs

        self.drafter.propose_behind = proposed  # type: ignore[method-assign]
        self.stepped.engine.step = stepped  # type: ignore[method-assign]

    def assert_is_empty(self) -> None:
        kv, stats = self.drafter.kv, self.stepped.engine.stats()
        assert kv.num_free == kv.num_blocks and not self.drafter._followed
        assert stats.kv_blocks_free == stats.kv_blocks_total
        assert not self.stepped.engine.has_work


def answers(stepped: SteppedEngine, prompts: dict[str, list[int]], **params: Any) -> dict[str, list[int]]:
    for name, ids in prompts.items():
        stepped.add(name, ids, params={"max_tokens": LENGTH} | params)
    stepped.until(lambda: prompts.keys() <= stepped.ended.keys())
    return {name: stepped.tokens[name] for name in prompts}


@pytest.fixture(scope="module")
def near(fleet: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a model whose likeliest tokens are often those of the base, and often not."""
    folder = tmp_path_factory.mktemp("near") / "near"
    shutil.copytree(fleet("llama3").base, folder)
    [file] = folder.glob("*.safetensors")
    torch.manual_seed(0)
    noisy = {
        name: w + 0.03 * w.std() * torch.randn_like(w) if w.ndim == 2 else w for name, w in load_file(file).items()
    }
    save_file(noisy, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("params", [{}, {"temperature": 0.2, "seed": 3, "top_p": 0.9}])
def test_answers_and_the_share_of_right_drafts_are_those_of_steps_that_wait(fleet, prompt, near, params) -> None:
    base = fleet("llama3").base
    prompts = {"a": prompt(20), "b": prompt(35), "c": prompt(7)}
    expected = answers(SteppedEngine(base), prompts, **params)
    ahead, waiting = Drafting(base, near), Drafting(base, near, async_scheduling=False)
    assert answers(ahead.stepped, prompts, **params) == expected == answers(waiting.stepped, prompts, **params)
    ahead.assert_is_empty()
    assert waiting.behind == 0
    assert ahead.behind > 0.8 * ahead.drafted
    assert 0.2 * ahead.drafted < ahead.accepted < 0.9 * ahead.drafted
    assert abs(ahead.accepted / ahead.drafted - waiting.accepted / waiting.drafted) < 0.15
