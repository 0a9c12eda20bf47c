from collections import Counter

import pytest

from lorafleet.cluster.routing.routing import ReplicaChooser, ReplicaLoad
from lorafleet.cluster.routing.rule_names import RoutingRule
from lorafleet.cluster.routing.simple_rules import make_chooser

SIMPLE: tuple[RoutingRule, ...] = ("sticky", "power-of-two", "round-robin")


def made(rule: RoutingRule, loads: dict[str, ReplicaLoad]) -> ReplicaChooser:
    chooser = make_chooser(rule, seed=0)
    chooser.set_replicas(loads)
    for replica_id, load in loads.items():
        chooser.set_load(replica_id, load)
    return chooser


def send(chooser: ReplicaChooser, adapter: str) -> str:
    [chosen, *_] = chooser.rank(adapter)
    chooser.sent(adapter, chosen, 100)
    return chosen


@pytest.mark.parametrize("rule", SIMPLE)
def test_all_replicas_are_ranked_once_for_the_base_and_for_adapters(rule: RoutingRule) -> None:
    chooser = made(rule, dict.fromkeys("abcde", ReplicaLoad()))
    for adapter in ("", "sql"):
        assert sorted(chooser.rank(adapter)) == list("abcde")
    assert made(rule, {}).rank("sql") == []


def test_round_robin_takes_them_in_turn_whatever_they_hold() -> None:
    chooser = made("round-robin", dict.fromkeys("abc", ReplicaLoad()))
    chooser.set_tier("b", "sql", "gpu")
    assert [send(chooser, "sql") for _ in range(6)] == list("abcabc")


def test_of_two_the_one_with_fewer_requests_is_taken() -> None:
    chooser = made("power-of-two", {"a": ReplicaLoad(num_running=9), "b": ReplicaLoad(num_waiting=3)})
    chooser.set_tier("a", "sql", "gpu")
    assert [send(chooser, "sql") for _ in range(6)] == list("bbbbbb")
    assert Counter(send(chooser, "sql") for _ in range(20)) == {"a": 10, "b": 10}


def test_a_report_includes_what_was_sent_before_it() -> None:
    chooser = made("power-of-two", {"a": ReplicaLoad(), "b": ReplicaLoad(num_running=2)})
    assert [send(chooser, "") for _ in range(2)] == ["a", "a"]
    chooser.set_load("a", ReplicaLoad(num_running=1))
    assert send(chooser, "") == "a"


def test_sticky_stays_with_the_holders_and_takes_the_freer_of_two() -> None:
    chooser = made("sticky", {"a": ReplicaLoad(), "b": ReplicaLoad(num_running=50), "c": ReplicaLoad(num_running=40)})
    chooser.set_tier("b", "sql", "gpu")
    assert send(chooser, "sql") == "b"
    chooser.set_tier("c", "sql", "cpu")
    assert send(chooser, "sql") == "c"


def test_sticky_leaves_holders_whose_batch_is_full_for_the_one_with_the_fewest_adapters() -> None:
    chooser = made("sticky", {"a": ReplicaLoad(), "b": ReplicaLoad(free_places=0), "c": ReplicaLoad()})
    chooser.set_tier("b", "sql", "gpu")
    chooser.set_tier("a", "chat", "gpu")
    assert chooser.rank("sql")[0] == "c"
    chooser.set_tier("a", "chat", None)
    chooser.set_tier("c", "chat", "gpu")
    assert chooser.rank("sql")[0] == "a"


def test_sticky_gives_new_adapters_to_all_in_turn_and_remembers_where_before_any_report() -> None:
    chooser = made("sticky", dict.fromkeys("abcd", ReplicaLoad()))
    homes = {name: send(chooser, name) for name in ("one", "two", "three", "four")}
    assert sorted(homes.values()) == list("abcd")
    assert {name: send(chooser, name) for name in homes} == homes


def test_a_replica_that_came_back_starts_without_the_requests_of_before() -> None:
    chooser = made("power-of-two", {"a": ReplicaLoad(num_running=100), "b": ReplicaLoad(num_running=5)})
    chooser.set_replicas("b")
    chooser.forget("a")
    chooser.set_replicas("ab")
    assert chooser.rank("")[0] == "a"


def test_without_placement_only_pinned_adapters_get_homes() -> None:
    from lorafleet.cluster.directory.placer import Placer
    from lorafleet.cluster.directory.residency import Report, Residency

    for places, placed in ((True, ["cold", "hot"]), (False, ["cold"])):
        residency = Residency("epoch", None, lambda _: 1)
        residency.accept(Report("a", 1, True, {}, ReplicaLoad(), {"hot": 10_000}, 16, []))
        placer = Placer(
            residency,
            lambda _: (1, 16),
            lambda: {"cold": ("a",)},
            lambda *_: None,
            None,
            places_by_demand=places,
        )
        for _ in placer.round(1.0):
            pass
        chooser = ReplicaChooser()
        chooser.set_replicas("a")
        residency.publish()
        assert sorted(residency.since("", -1).placed) == placed
