"""Properties of placements; demand is in tokens a second."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping

from lorafleet.cluster.directory.placement import STEP, Holders, Homes, PlacedAdapter, Placement, Policy

POLICY = Policy()
SIZE = 84_000_000


def nobody(_: str) -> tuple[str, ...]:
    return ()


def place(
    adapters: Mapping[str, PlacedAdapter],
    where: Mapping[str, float],
    before: Homes,
    holders: Holders,
    policy: Policy = POLICY,
) -> Homes:
    placement = Placement(adapters, where, before, holders, policy)
    for _ in placement.steps():
        pass
    return placement.homes


def replicas(count: int) -> dict[str, float]:
    return {f"r{i}": 1.0 for i in range(count)}


def zipf(count: int, total: float = 10_000.0, seed: int = 0) -> dict[str, PlacedAdapter]:
    ranks = random.Random(seed).choices((8, 16, 32, 64), k=count)
    weights = [1 / (i + 1) for i in range(count)]
    return {
        f"a{i}": PlacedAdapter(rank * SIZE // 16, rank, total * weight / sum(weights))
        for i, (rank, weight) in enumerate(zip(ranks, weights, strict=True))
    }


def settle(adapters: dict[str, PlacedAdapter], where: dict[str, float], homes: Homes | None = None) -> Homes:
    for _ in range(100):
        before, homes = homes, place(adapters, where, homes or {}, nobody)
        if homes == before:
            return homes
    raise AssertionError("it never comes to rest")


def loads(adapters: dict[str, PlacedAdapter], homes: Homes) -> Counter[str]:
    load = Counter[str]()
    for one, at in homes.items():
        for home in at:
            load[home] += adapters[one].demand * (1 + POLICY.rank_cost * adapters[one].rank) / len(at)  # type: ignore[assignment]  # a Counter of floats
    return load


def moved(before: Homes, after: Homes) -> int:
    return sum(len(set(after.get(one, ())) - set(homes)) for one, homes in before.items())


def test_nothing_moves_without_cause() -> None:
    adapters = zipf(200)
    homes = settle(adapters, replicas(8))
    assert place(adapters, replicas(8), homes, nobody) == homes
    trembling = {
        one: PlacedAdapter(a.num_bytes, a.rank, a.demand * random.Random(one).uniform(0.95, 1.05))
        for one, a in adapters.items()
    }
    assert moved(homes, place(trembling, replicas(8), homes, nobody)) == 0


def test_the_same_input_gives_the_same_homes_in_any_order() -> None:
    adapters = zipf(100)
    shuffled = dict(sorted(adapters.items(), key=lambda item: hash(item[0])))
    assert place(adapters, replicas(8), {}, nobody) == place(shuffled, dict(reversed(replicas(8).items())), {}, nobody)


def test_the_load_of_every_replica_is_bounded() -> None:
    for seed in range(5):
        adapters = zipf(300, seed=seed)
        load = loads(adapters, settle(adapters, replicas(8)))
        assert len(load) == 8
        assert max(load.values()) <= POLICY.leave * sum(load.values()) / 8


def test_bytes_are_bounded_too_a_wide_adapter_counting_as_several() -> None:
    wide = {f"w{i}": PlacedAdapter(4 * SIZE, 64, 1.0) for i in range(40)}
    narrow = {f"n{i}": PlacedAdapter(SIZE, 16, 1.0) for i in range(160)}
    homes = settle(wide | narrow, replicas(8))
    held = Counter[str]()
    for one, at in homes.items():
        for home in at:
            held[home] += (wide | narrow)[one].num_bytes
    assert max(held.values()) <= POLICY.leave * sum(held.values()) / 8


def test_a_hot_adapter_has_homes_in_proportion_to_its_demand() -> None:
    cold = {f"c{i}": PlacedAdapter(SIZE, 16, 10.0) for i in range(400)}
    shares = {}
    for demand in (100.0, 1000.0, 12_000.0):
        homes = settle(cold | {"hot": PlacedAdapter(SIZE, 16, demand)}, replicas(8))
        shares[demand] = len(homes["hot"])
    assert shares[100.0] == 1
    assert shares[100.0] < shares[1000.0] < shares[12_000.0] <= 8


def test_a_home_is_given_up_only_when_demand_has_fallen_well_below_what_brought_it() -> None:
    cold = {f"c{i}": PlacedAdapter(SIZE, 16, 10.0) for i in range(400)}

    def with_hot(demand: float) -> dict[str, PlacedAdapter]:
        return cold | {"hot": PlacedAdapter(SIZE, 16, demand)}

    homes = settle(with_hot(4000.0), replicas(8))
    num_homes = len(homes["hot"])
    assert len(place(with_hot(3600.0), replicas(8), homes, nobody)["hot"]) == num_homes
    assert len(settle(with_hot(100.0), replicas(8), homes)["hot"]) == 1


def test_survivors_absorb_a_lost_replica_at_once_and_nothing_else_moves() -> None:
    adapters = zipf(300)
    homes = settle(adapters, replicas(8))
    lost = {one for one, at in homes.items() if "r3" in at}
    left = {name: weight for name, weight in replicas(8).items() if name != "r3"}
    after = place(adapters, left, homes, nobody)
    assert all(at and "r3" not in at for at in after.values())
    kept = {one: homes[one] for one in homes.keys() - lost}
    assert moved(kept, after) <= POLICY.max_moves
    takers = Counter(home for one in lost for home in after[one] if home not in homes[one])
    assert len(takers) == 7


def test_a_new_replica_is_filled_a_few_adapters_a_round() -> None:
    adapters = zipf(300)
    homes = settle(adapters, replicas(8))
    for _ in range(20):
        after = place(adapters, replicas(9), homes, nobody)
        assert moved(homes, after) <= POLICY.max_moves
        homes = after
    load = loads(adapters, homes)
    assert max(load.values()) <= POLICY.leave * sum(load.values()) / 9


def test_a_replica_that_warms_up_gets_less() -> None:
    adapters = zipf(400)
    load = loads(adapters, settle(adapters, replicas(8) | {"new": 0.2}))
    fair = sum(load.values()) / 8.2
    assert load["new"] <= POLICY.leave * 0.2 * fair


def test_pinned_replicas_are_homes_whatever_the_demand_and_count_as_load() -> None:
    pins = ("r1", "r3", "r5")
    adapters = zipf(50) | {"pinned": PlacedAdapter(SIZE, 16, 0.0, pins)}
    homes = settle(adapters, replicas(8), {"pinned": ("r0",)})
    assert homes["pinned"] == pins
    assert place(adapters, replicas(4), {}, nobody)["pinned"] == ("r1", "r3"), "two of them are gone"
    others = {f"a{i}": PlacedAdapter(SIZE, 16, 10.0) for i in range(40)}
    heavy = others | {f"pinned{i}": PlacedAdapter(4 * SIZE, 64, 0.0, ("r1",)) for i in range(20)}
    homes = settle(heavy, replicas(8))
    assert all(at == ("r1",) for one, at in homes.items() if one.startswith("pinned")), "a pin is never moved"
    assert all("r1" not in at for one, at in homes.items() if one in others), "others keep away from them"


def test_a_pinned_adapter_has_more_homes_where_demand_asks_for_them() -> None:
    cold = {f"c{i}": PlacedAdapter(SIZE, 16, 10.0) for i in range(400)}
    homes = settle(cold | {"hot": PlacedAdapter(SIZE, 16, 12_000.0, ("r7",))}, replicas(8))
    assert homes["hot"][0] == "r7"
    assert len(homes["hot"]) > 2


def test_a_home_is_rather_chosen_among_those_that_hold_the_adapter() -> None:
    adapters = {f"a{i}": PlacedAdapter(SIZE, 16, 1.0) for i in range(40)}
    held = {f"a{i}": [f"r{i % 8}"] for i in range(40)}
    assert place(adapters, replicas(8), {}, held.__getitem__) == {one: tuple(at) for one, at in held.items()}


def test_without_replicas_or_adapters_there_are_no_homes() -> None:
    assert place(zipf(3), {}, {"a0": ("r0",)}, nobody) == {}
    assert place({}, replicas(2), {"a0": ("r0",)}, nobody) == {}


def test_between_two_pauses_lies_the_work_for_one_home_or_for_a_few_adapters_that_keep_theirs() -> None:
    asked: list[str] = []

    def note(one: str) -> tuple[str, ...]:
        asked.append(one)
        return ()

    new = zipf(10 * STEP)
    placement = Placement(new, replicas(8), {}, note)
    searches = [len(asked) for _ in placement.steps()]
    most = max(after - before for before, after in itertools.pairwise(searches))
    assert most <= 1 + POLICY.max_moves, "searches for a home in one step"
    homes = settle(new, replicas(8))
    asked.clear()
    num_steps = sum(1 for _ in Placement(new, replicas(8), homes, note).steps())
    assert asked == [], "who has a home that fits is not looked at again"
    assert num_steps >= 2 * len(new) / STEP
