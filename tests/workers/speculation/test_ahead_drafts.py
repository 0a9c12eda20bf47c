"""Drafts of a model follow a step in flight, so that steps with drafts overlap. No answer changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lorafleet.protocol.engine_config import SpeculativeConfig
from lorafleet.workers.speculation.model_drafter import ModelDrafter
from stepped_engine import SteppedEngine
from tests.workers.speculation.drafting import speculate

LENGTH = 40


class Ahead:
    """An engine with a draft model whose steps overlap, and how often it drafted behind a step in flight."""

    def __init__(self, base: Path, draft: Path, most_tokens: int = 4, **options: Any) -> None:
        config = SpeculativeConfig("draft_model", model=str(draft))
        self.stepped = SteppedEngine(base, **({"speculative_config": config, "async_scheduling": True} | options))
        speculation = self.stepped.engine.scheduler.speculation
        assert speculation is not None and isinstance(speculation.drafter, ModelDrafter)
        self.drafter = speculation.drafter
        speculate(self.stepped.engine, self.drafter, most_tokens)
        self.counts: list[int] = []  # The draft tokens of each call.
        self.accepted = self.drafted = 0
        propose, step = self.drafter.propose_behind, self.stepped.engine.step

        def proposed(*args: Any) -> Any:
            made = propose(*args)
            self.counts.append(sum(made.counts.values()))
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

    def answers(self, prompts: dict[str, list[int]], **params: Any) -> dict[str, list[int]]:
        return answers(self.stepped, prompts, **params)

    def assert_is_empty(self) -> None:
        kv, stats = self.drafter.kv, self.stepped.engine.stats()
        assert kv.num_free == kv.num_blocks and not self.drafter._followed
        assert stats.kv_blocks_free == stats.kv_blocks_total


def answers(stepped: SteppedEngine, prompts: dict[str, list[int]], **params: Any) -> dict[str, list[int]]:
    for name, ids in prompts.items():
        stepped.add(name, ids, params={"max_tokens": LENGTH} | params)
    stepped.until(lambda: prompts.keys() <= stepped.ended.keys())
    return {name: stepped.tokens[name] for name in prompts}


@pytest.fixture(scope="module")
def near(fleet: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a model that is often like the base of the fleet, and often not."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("near") / "near"
    shutil.copytree(fleet("llama3").base, folder)
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    torch.manual_seed(0)
    save_file(
        {n: t + 0.03 * t.std() * torch.randn_like(t) if t.ndim == 2 else t for n, t in tensors.items()},
        file,
        metadata={"format": "pt"},
    )
    return folder


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 3, "top_p": 0.9}])
def test_near(fleet, prompt, near, params) -> None:
    base = fleet("llama3").base
    prompts = {"a": prompt(20), "b": prompt(35), "c": prompt(7)}
    expected = answers(SteppedEngine(base), prompts, **params)
    for overlap in (False, True):
        ahead = Ahead(base, near, async_scheduling=overlap)
        assert ahead.answers(prompts, **params) == expected
        print(ahead.counts, ahead.drafted, ahead.accepted)
    ahead.assert_is_empty()
    assert sum(ahead.counts) > 0.5 * ahead.drafted
    assert 0.2 * ahead.drafted < ahead.accepted < 0.95 * ahead.drafted
