from __future__ import annotations

from lorafleet.api.telemetry.adapter_labels import ELECTION_S, OTHER, AdapterLabels


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def requests(labels: AdapterLabels, **counts: int) -> None:
    for name, count in counts.items():
        for _ in range(count):
            labels.count(name)


def test_the_first_adapters_have_labels_until_others_have_more_requests():
    clock = Clock()
    labels = AdapterLabels(2, clock)
    requests(labels, early=10, quiet=10, hot=100)
    assert labels.label("hot") == OTHER
    clock.now = ELECTION_S
    requests(labels, hot=1)
    assert labels.shown == {"hot", "early"}
    assert (labels.label("quiet"), labels.label("hot")) == (OTHER, "hot")


def test_equals_do_not_swap_their_label():
    clock = Clock()
    labels = AdapterLabels(1, clock)
    for turn in range(20):
        requests(labels, mine=10, rival=11 + turn % 5)
        clock.now += ELECTION_S
        assert labels.shown == {"mine"}
    for _ in range(4):
        requests(labels, mine=10, rival=60)
        clock.now += ELECTION_S
    assert labels.shown == {"rival"}


def test_what_nobody_asks_for_any_more_is_forgotten():
    clock = Clock()
    labels = AdapterLabels(2, clock)
    for i in range(5000):
        labels.count(f"cold{i}")
    for _ in range(3):
        clock.now += ELECTION_S
        labels.count("hot")
    assert len(labels._recent) <= 3 and "hot" in labels.shown


def test_an_adapter_called_other_is_counted_with_the_others():
    labels = AdapterLabels(5, Clock())
    assert labels.count(OTHER) == OTHER and labels.shown == set()
