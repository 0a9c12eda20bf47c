"""Changes on their way from the one who makes them to pollers."""

from __future__ import annotations

from lorafleet.cluster.directory.published_changes import PublishedChanges


def recorded(*keys: str, is_urgent: bool = False) -> PublishedChanges[str]:
    changes = PublishedChanges[str]()
    for key in keys:
        changes.record(key, is_urgent=is_urgent)
    return changes


def test_a_change_is_seen_once_it_is_published() -> None:
    changes = recorded("a", "b")
    assert (changes.version, changes.has_unpublished, list(changes.since(0))) == (0, True, [])
    changes.publish(most=10)
    assert (changes.version, changes.has_unpublished, list(changes.since(0))) == (2, False, ["b", "a"])
    assert list(changes.since(changes.version)) == []


def test_an_urgent_change_is_urgent_until_it_is_published_whatever_comes_after_it() -> None:
    changes = recorded("a", is_urgent=True)
    changes.record("b", is_urgent=False)
    assert changes.is_urgent
    changes.publish(most=10)
    changes.record("b", is_urgent=False)
    assert not changes.is_urgent


def test_a_poller_from_before_a_forgotten_change_or_of_another_epoch_cannot_be_served() -> None:
    changes = recorded("a")
    changes.publish(most=10)
    changes.record("b", is_urgent=False)
    changes.publish(most=1)
    assert [changes.reaches_back_to(version) for version in range(4)] == [False, True, True, False]
