"""Steps of a draft model or head."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from endless_download import EndlessDownload
from lorafleet.protocol.errors import EngineDead
from lorafleet.workers.speculation import draft_steps
from lorafleet.workers.speculation.draft_steps import DraftSteps


class GoneRank:
    def check(self) -> None:
        raise EngineDead("rank 1 is gone")


def steps(others: Any) -> DraftSteps:
    runner: Any = SimpleNamespace(device=torch.device("cpu"))
    return DraftSteps(runner, 16, None, others)


def test_tokens_are_read_as_they_were_drawn() -> None:
    assert steps(None).read(torch.tensor([7, 2, 9])) == [7, 2, 9]


def test_a_wait_for_drawn_tokens_ends_if_a_rank_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_steps, "Download", EndlessDownload)
    with pytest.raises(EngineDead):
        steps(GoneRank()).read(torch.tensor([7]))
