"""The durable log: what was acknowledged is there after any crash, and two writers lose nothing of each other's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from lorafleet.cluster.catalogue import catalogue_log as log_module
from lorafleet.cluster.catalogue.catalogue_log import CatalogueLog, Fenced
from lorafleet.cluster.catalogue.catalogue_records import AdapterRecord, Entry, RemovalRecord, VersionRecord
from lorafleet.cluster.catalogue.folder_store import FolderStore
from lorafleet.cluster.catalogue.packed import Packed, unpack
from lorafleet.protocol.errors import CatalogueDamaged, StoreError


@pytest.fixture(autouse=True)
def _small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "MERGE", 4)
    monkeypatch.setattr(log_module, "FAN_OUT", 3)


def adapter(name: str, number: int = 1) -> AdapterRecord:
    return AdapterRecord(name, (VersionRecord(number, f"digest{number}", "here", 8, 100, 0.0),))


def opened(folder: Path) -> tuple[CatalogueLog, dict[str, Entry]]:
    log = CatalogueLog(FolderStore(folder))
    return log, unpacked(log.load())


def unpacked(packed: dict[str, Packed]) -> dict[str, Entry]:
    return {name: unpack(one) for name, one in packed.items()}


def state(folder: Path) -> dict[str, Entry]:
    return opened(folder)[1]


def test_what_was_appended_is_there_after_a_restart(tmp_path: Path) -> None:
    log, entries = opened(tmp_path)
    assert entries == {}
    for number in range(1, 60):
        assert log.append(adapter(f"a{number % 7}", number)) == []
        expected = {f"a{n % 7}": adapter(f"a{n % 7}", n) for n in range(1, number + 1)}
        assert state(tmp_path) == expected
        assert opened(tmp_path)[0].length == number


def test_a_start_reads_few_objects_however_long_the_log_is(tmp_path: Path) -> None:
    log, _ = opened(tmp_path)
    for number in range(4 * 3 * 3 + 5):
        log.append(adapter(f"a{number}"))
    assert [key.partition("/")[2] for key in FolderStore(tmp_path).keys("runs/")] == [
        "0000000000000000-0000000000000036",
        "0000000000000036-0000000000000040",
    ]
    assert len(FolderStore(tmp_path).keys("log/")) == 1 + 4  # the last MERGE stay for those who read on


def test_a_removal_outlives_merges_only_while_it_says_something(tmp_path: Path) -> None:
    log, _ = opened(tmp_path)
    for entry in (adapter("x"), adapter("y"), RemovalRecord("x"), RemovalRecord("y", "run1")):
        log.append(entry)
    assert state(tmp_path) == {"y": RemovalRecord("y", "run1")}


@pytest.mark.parametrize("left", [0, 1, 30, -1])
def test_a_torn_tail_is_skipped_and_the_log_goes_on_behind_it(tmp_path: Path, left: int) -> None:
    log, _ = opened(tmp_path)
    log.append(adapter("a"))
    log.append(adapter("b"))
    tail = tmp_path / FolderStore(tmp_path).keys("log/")[-1]
    tail.write_bytes(tail.read_bytes()[:left])
    log, entries = opened(tmp_path)
    assert entries == {"a": adapter("a")}
    for number in range(10):
        log.append(adapter("c", number))
        assert state(tmp_path) == {"a": adapter("a"), "c": adapter("c", number)}


@pytest.mark.parametrize("damage", ["torn", "lost"])
def test_an_acknowledged_change_that_is_lost_is_an_error_that_names_it(tmp_path: Path, damage: str) -> None:
    log, _ = opened(tmp_path)
    for name in "abc":
        log.append(adapter(name))
    middle = tmp_path / FolderStore(tmp_path).keys("log/")[1]
    if damage == "torn":
        middle.write_bytes(b"")
    else:
        middle.unlink()
    with pytest.raises(CatalogueDamaged, match="log/0000000000000001 is lost"):
        opened(tmp_path)


def test_a_damaged_run_is_an_error_that_names_it(tmp_path: Path) -> None:
    log, _ = opened(tmp_path)
    for name in "abcd":
        log.append(adapter(name))
    (tmp_path / FolderStore(tmp_path).keys("runs/")[0]).write_bytes(b"x")
    with pytest.raises(CatalogueDamaged, match="runs/"):
        opened(tmp_path)


def test_a_writer_that_was_overtaken_learns_what_came_first_and_writes_nothing(tmp_path: Path) -> None:
    one, _ = opened(tmp_path)
    two, _ = opened(tmp_path)
    one.append(adapter("a"))
    one.append(adapter("b"))
    assert two.append(adapter("a", 2)) == [adapter("a"), adapter("b")]
    assert state(tmp_path)["a"] == adapter("a")
    assert two.append(adapter("a", 2)) == []
    assert state(tmp_path)["a"] == adapter("a", 2)


def test_a_writer_that_slept_while_its_number_was_merged_away_is_fenced(tmp_path: Path) -> None:
    sleeper, _ = opened(tmp_path)
    other, _ = opened(tmp_path)
    for number in range(4 * 3 + 1):
        other.append(adapter("a", number))
    assert "log/0000000000000000" not in FolderStore(tmp_path).keys("log/")
    with pytest.raises(Fenced):
        sleeper.append(adapter("lost"))
    assert state(tmp_path) == {"a": adapter("a", 12)}
    assert unpacked(sleeper.load()) == state(tmp_path)
    assert sleeper.append(adapter("b")) == []


def test_a_reader_sees_what_others_wrote_and_loads_anew_only_when_it_is_far_behind(tmp_path: Path) -> None:
    reader, _ = opened(tmp_path)
    writer, _ = opened(tmp_path)
    assert reader.read_on() == []
    for number in range(1, 20):
        writer.append(adapter("a", number))
        assert reader.read_on() == [adapter("a", number)]
    for number in range(20, 30):
        writer.append(adapter("a", number))
    with pytest.raises(Fenced):
        reader.read_on()
    assert unpacked(reader.load()) == {"a": adapter("a", 29)}
    assert reader.read_on() == []


def test_a_read_that_fails_in_the_middle_loses_none_of_the_changes(tmp_path: Path) -> None:
    class Failing(FolderStore):
        fails_at = ""

        def read(self, key: str) -> bytes | None:
            if key == self.fails_at:
                raise StoreError("the store does not answer")
            return super().read(key)

    store = Failing(tmp_path)
    reader, (writer, _) = CatalogueLog(store), opened(tmp_path)
    reader.load()
    for number in (1, 2):
        writer.append(adapter("a", number))
    store.fails_at = "log/0000000000000001"
    with pytest.raises(StoreError):
        reader.read_on()
    store.fails_at = ""
    assert reader.read_on() == [adapter("a", 1), adapter("a", 2)]


def test_writers_at_the_same_time_lose_no_update(tmp_path: Path) -> None:
    def count_up(name: str) -> None:
        log, entries = opened(tmp_path)
        for _ in range(15):
            while True:
                present = entries.get(name)
                number = present.versions[0].number + 1 if isinstance(present, AdapterRecord) else 1
                try:
                    others = log.append(adapter(name, number))
                except Fenced:
                    entries = unpacked(log.load())
                    continue
                entries.update((entry.name, entry) for entry in others)
                if not others:
                    entries[name] = adapter(name, number)
                    break

    threads = [threading.Thread(target=count_up, args=("shared",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert state(tmp_path) == {"shared": adapter("shared", 60)}


def test_a_change_that_others_merged_before_its_writer_looked_is_not_written_twice(tmp_path: Path) -> None:
    class Overtaken(FolderStore):
        def create(self, key: str, content: bytes) -> bool:
            created = super().create(key, content)
            other, _ = opened(tmp_path)
            while other.length < 9:
                other.append(adapter("other", other.length))
            return created

    log = CatalogueLog(Overtaken(tmp_path))
    log.load()
    assert log.append(adapter("mine")) == []
    assert state(tmp_path) == {"mine": adapter("mine"), "other": adapter("other", 8)}
    with pytest.raises(Fenced):
        log.append(adapter("next"))
    assert "next" not in state(tmp_path)


class Crash(BaseException):
    pass


class CrashingStore(FolderStore):
    """Dies after so many of its writes, before or behind the write."""

    def __init__(self, root: Path, crash_at: int, *, before: bool) -> None:
        super().__init__(root)
        self.left, self.before = crash_at, before

    def _step(self, write: Callable[[], bool | None]) -> bool | None:
        self.left -= 1
        if self.left == 0 and self.before:
            raise Crash
        done = write()
        if self.left == 0:
            raise Crash
        return done

    def create(self, key: str, content: bytes) -> bool:
        return bool(self._step(lambda: super(CrashingStore, self).create(key, content)))

    def delete(self, key: str) -> None:
        self._step(lambda: super(CrashingStore, self).delete(key))


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("crash_at", range(1, 60, 2))
def test_a_crash_at_any_step_loses_nothing_that_was_acknowledged(tmp_path: Path, crash_at: int, before: bool) -> None:
    log = CatalogueLog(CrashingStore(tmp_path, crash_at, before=before))
    acknowledged = 0
    try:
        log.load()
        for number in range(1, 30):
            log.append(adapter(f"a{number % 5}", number))
            acknowledged = number
    except Crash:
        pass
    found = {
        name: entry.versions[0].number for name, entry in state(tmp_path).items() if isinstance(entry, AdapterRecord)
    }
    expected = {f"a{n % 5}": n for n in range(1, acknowledged + 1)}
    unanswered = expected | {f"a{(acknowledged + 1) % 5}": acknowledged + 1}
    assert found in (expected, unanswered)
    again, entries = opened(tmp_path)
    assert again.append(adapter("next")) == []
    assert state(tmp_path) == {**entries, "next": adapter("next")}


def test_a_write_that_was_done_twice_by_a_retry_counts_once(tmp_path: Path) -> None:
    class Retrying(FolderStore):
        def create(self, key: str, content: bytes) -> bool:
            super().create(key, content)
            return super().create(key, content)

    log = CatalogueLog(Retrying(tmp_path))
    log.load()
    for name in "abcde":
        assert log.append(adapter(name)) == []
    assert len(state(tmp_path)) == 5
