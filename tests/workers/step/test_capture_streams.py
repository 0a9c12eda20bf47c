"""The streams of captures, without a GPU."""

from __future__ import annotations

import pytest
import torch

from lorafleet.workers.step.capture_streams import CaptureStreams


def test_all_captures_of_a_device_share_their_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[torch.device, int]] = []

    class Stream:
        def __init__(self, device: torch.device, priority: int) -> None:
            made.append((device, priority))

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    first = CaptureStreams.of(torch.device("cuda", 90))
    assert CaptureStreams.of(torch.device("cuda", 90)) is first
    assert len(made) == 4 and len({*first.main.values(), *first.side.values()}) == 4
    assert CaptureStreams.of(torch.device("cuda", 91)) is not first
