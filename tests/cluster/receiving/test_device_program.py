"""The copies out of a trainer's memory, and the handles that are opened or refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lorafleet.cluster.receiving.device_program import Run, runs_of
from lorafleet.protocol.adapter_formats.announced_tensors import TensorPlace
from lorafleet.protocol.shared_segment import SharedSegment, open_segment


def places(*starts: int) -> list[TensorPlace]:
    return [TensorPlace("uint8", (4,), start, 4) for start in starts]


@pytest.mark.parametrize(
    ("starts", "runs"),
    [
        ((100, 104, 108), [Run(7, 100, 12)]),
        ((108, 100, 104), [Run(7, 108, 4), Run(11, 100, 8)]),
        ((104, 100), [Run(7, 104, 4), Run(11, 100, 4)]),
    ],
)
def test_tensors_that_are_together_are_copied_together(starts: tuple[int, ...], runs: list[Run]) -> None:
    assert runs_of(places(*starts), 7) == runs


def test_a_segment_is_read_by_others_until_it_is_closed() -> None:
    segment = SharedSegment(8)
    segment.content[:] = b"weights!"
    opened = open_segment(segment.handle)
    assert bytes(opened) == b"weights!" and opened.readonly
    segment.close()
    assert bytes(opened) == b"weights!"
    with pytest.raises(ValueError, match="cannot be opened"):
        open_segment(segment.handle)


def test_only_segments_are_opened(tmp_path: Path) -> None:
    name = f"lorafleet-{'e' * 32}"
    link = Path("/dev/shm") / name
    (tmp_path / "secret").write_bytes(b"secret")
    link.symlink_to(tmp_path / "secret")
    try:
        with pytest.raises(ValueError, match="cannot be opened"):
            open_segment(name.encode())
    finally:
        link.unlink()
    for handle in (b"", b"../shm/x", b"\xff", os.fsencode(tmp_path / "secret"), name.encode() + b"\n"):
        with pytest.raises(ValueError, match="does not name"):
            open_segment(handle)
