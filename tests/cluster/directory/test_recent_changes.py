from __future__ import annotations

from lorafleet.cluster.directory.recent_changes import RecentChanges


def noted(*keys: str) -> RecentChanges[str]:
    changes = RecentChanges[str]()
    for version, key in enumerate(keys, 1):
        changes.record(key, version)
    return changes


def test_what_changed_after_a_version_comes_last_first_and_once() -> None:
    changes = noted("a", "b", "a", "c")
    assert list(changes.since(0)) == ["c", "a", "b"]
    assert list(changes.since(2)) == ["c", "a"]
    assert list(changes.since(4)) == []


def test_what_changes_again_and_again_pushes_nothing_out() -> None:
    changes = noted("rare", *["busy"] * 100)
    changes.shrink(2)
    assert (changes.forgotten, list(changes.since(0))) == (0, ["busy", "rare"])


def test_who_is_behind_what_was_forgotten_can_tell() -> None:
    changes = noted("a", "b", "c")
    changes.shrink(1)
    assert (len(changes), changes.forgotten, list(changes.since(2))) == (1, 2, ["c"])
