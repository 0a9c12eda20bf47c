"""The copies out of a trainer's memory, and the handles that are opened or refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from lorafleet.cluster.receiving.device_program import Run, runs_of
from lorafleet.cluster.receiving.receiver_messages import ReceiveJob
from lorafleet.protocol.adapter_formats.announced_tensors import TensorPlace
from lorafleet.protocol.framing import receive, send
from lorafleet.protocol.shared_segment import SharedSegment, open_segment, remove_abandoned_segments
from lorafleet.sandbox.process import command_of, start_program

SHARED = Path("/dev/shm")


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


OWNER = """
import os, sys, time
from lorafleet.protocol.shared_segment import SharedSegment
segment = SharedSegment(8)
segment.content[:] = b"weights!"
print(segment.name, flush=True)
time.sleep(600)
"""


@contextmanager
def killed_owner() -> Iterator[tuple[str, Callable[[], None]]]:
    """Yields the name of another process's segment, and a function that kills the process."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)

    def kill() -> None:
        owner.kill()
        owner.wait()

    try:
        assert owner.stdout is not None
        with owner.stdout as lines:
            yield lines.readline().strip(), kill
    finally:
        kill()


def test_a_killed_process_s_segment_is_removed_and_no_other() -> None:
    own, foreign = SharedSegment(8), SHARED / f"lorafleet-{'f' * 31}"
    foreign.touch()
    try:
        with killed_owner() as (name, kill):
            remove_abandoned_segments()
            opened = open_segment(name.encode())
            kill()
            remove_abandoned_segments()
            assert not (SHARED / name).exists()
            assert bytes(opened) == b"weights!"
        assert (SHARED / own.name).exists() and foreign.exists()
    finally:
        own.close()
        foreign.unlink()
    assert not (SHARED / own.name).exists()


def test_a_trainer_that_is_killed_during_a_push_leaves_no_memory(tmp_path: Path) -> None:
    program = start_program(command_of("lorafleet.cluster.receiving.device_program"), {"device": "cpu"}, (), {})
    program.socket.settimeout(60)
    target = tmp_path / "memory"
    try:
        assert b"has_ended" in (receive(program.socket) or b"")
        with killed_owner() as (name, kill):
            target.write_bytes(bytes(8))
            kill()
            job = ReceiveJob(str(target), 8, tuple(places(0, 4)), name.encode().hex())
            send(program.socket, msgspec.json.encode(job))
            while b"has_ended" not in (receive(program.socket) or b"has_ended"):
                pass
            assert target.read_bytes() == b"weights!"
            assert not (SHARED / name).exists()
    finally:
        program.socket.close()
        program.stop()


def test_only_segments_are_opened(tmp_path: Path) -> None:
    name = f"lorafleet-{'e' * 32}"
    link = SHARED / name
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
