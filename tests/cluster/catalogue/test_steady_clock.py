from __future__ import annotations

import io
import logging
import time
from pathlib import Path

import pytest

from lorafleet.cluster.batches.batch_records import FileRecord, new_id
from lorafleet.cluster.batches.batch_store import BatchStore
from lorafleet.cluster.catalogue.folder_store import FolderStore
from lorafleet.cluster.catalogue.steady_clock import SteadyClock

DAY_S = 86_400.0


class Machine:
    """A machine whose clock is off by `jump_s`."""

    def __init__(self) -> None:
        self.up_s, self.jump_s = 50.0, 0.0
        self.clock = SteadyClock(lambda: 1e9 + self.up_s + self.jump_s, lambda: self.up_s, settle_s=600)

    def passes(self, seconds: float) -> float:
        self.up_s += seconds
        return self.clock() - 1e9


@pytest.mark.parametrize("jump_s", [DAY_S, -DAY_S, 60.0])
def test_time_goes_on_evenly_until_a_jump_has_lasted(jump_s: float, caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    machine.jump_s = jump_s
    with caplog.at_level(logging.WARNING):
        assert [machine.passes(100.0) for _ in range(6)] == [150.0, 250.0, 350.0, 450.0, 550.0, 650.0]
    assert [record.getMessage() for record in caplog.records if f"jumped by {jump_s:.0f} s" in record.getMessage()]
    assert len(caplog.records) == 1
    assert machine.passes(100.0) == 750.0 + jump_s


def test_a_jump_back_is_forgotten_and_one_that_jumps_on_begins_anew() -> None:
    machine = Machine()
    machine.jump_s = DAY_S
    assert machine.passes(500.0) == 550.0
    machine.jump_s = 0.0
    assert machine.passes(500.0) == 1050.0
    machine.jump_s = DAY_S
    assert machine.passes(500.0) == 1550.0
    machine.jump_s = 2 * DAY_S
    assert machine.passes(500.0) == 2050.0
    assert machine.passes(599.0) == 2649.0
    assert machine.passes(1.0) == 2650.0 + 2 * DAY_S


def test_a_clock_that_is_set_right_by_little_is_followed() -> None:
    machine = Machine()
    for _ in range(20):
        machine.jump_s += 2.0
        assert machine.passes(1.0) == machine.up_s + machine.jump_s


def test_a_suspend_of_the_machine_is_no_jump(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    suspended_s = 0.0
    clocks = {time.CLOCK_BOOTTIME: lambda: 50.0 + suspended_s, time.CLOCK_MONOTONIC: lambda: 50.0}
    monkeypatch.setattr(time, "clock_gettime", lambda clock: clocks[clock]())
    clock = SteadyClock(lambda: 1e9 + suspended_s)
    suspended_s = DAY_S
    assert clock() == 1e9 + DAY_S and not caplog.records


@pytest.mark.parametrize("jump_s", [31 * DAY_S, -31 * DAY_S])
def test_files_and_uploads_outlive_a_jump_of_the_clock(tmp_path: Path, jump_s: float) -> None:
    machine, root = Machine(), FolderStore(tmp_path)
    store = BatchStore(root, lambda: 1 << 30, machine.clock)

    def add() -> FileRecord:
        now_s = int(store.clock())
        record = FileRecord(new_id("file-", now_s), "o", 3, now_s, now_s + 7200, "in.jsonl", "batch")
        store.files.add(record, io.BytesIO(b"{}\n"))
        return record

    before = add()
    machine.jump_s = jump_s
    machine.passes(1.0)
    during = add()
    [uploading] = root.keys(f"files/o.{during.file_id}.")
    root.delete(uploading)  # as if its record were still to come
    store.care()
    assert store.files.find("o", before.file_id) == before
    assert root.keys(f"file-data/{during.file_id}.")
    machine.jump_s = 0.0
    machine.passes(1.0)
    store.care()
    assert store.files.find("o", before.file_id) == before
    assert root.keys(f"file-data/{during.file_id}.")
