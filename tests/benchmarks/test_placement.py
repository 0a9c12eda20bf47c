import pytest

import placement
import placement_arms
import placement_bound
from placement import Scene
from placement_workloads import WORKLOADS, Load, draw
from simulated_replica import RANK_BYTES, STEPS_S, Replica, read_s, step_s
from simulated_storage import Storage
from slora_workload import Arrival


@pytest.mark.parametrize("arm", placement_arms.ARMS)
def test_every_rule_answers_all_and_the_same_seed_gives_the_same(arm: str) -> None:
    load = Load("S-LoRA, alpha .3", rate=20, duration_s=30, num_adapters=256, seed=1)
    first = placement.simulate(load, arm)
    assert first == placement.simulate(load, arm)
    assert first.attainment > 0.9


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_has_its_rate_and_its_adapters(name: str) -> None:
    arrivals = draw(Load(name, rate=40, duration_s=200, num_adapters=64, seed=0))
    assert len(arrivals) == pytest.approx(8000, rel=0.35)
    assert all(0 <= one.adapter < 64 and one.num_input > 0 < one.num_output for one in arrivals)
    assert [one.at_s for one in arrivals] == sorted(one.at_s for one in arrivals)


def test_steps_take_what_was_measured() -> None:
    assert all(step_s(batch) == pytest.approx(seconds) for batch, seconds in STEPS_S)
    assert STEPS_S[1][1] < step_s(30) < STEPS_S[2][1]


def test_a_first_read_computes_the_digest_and_a_later_one_does_not() -> None:
    """On one H200, the first token of a new adapter came after 272 ms with rank 64 and 61 ms with rank 8. That of a
    known one came after 87 and 39 ms."""
    for rank, new_s, known_s in ((64, 0.272, 0.087), (8, 0.061, 0.039)):
        size = rank * RANK_BYTES
        assert read_s(size, is_new=True) == pytest.approx(new_s, rel=0.1)
        assert read_s(size, is_new=False) == pytest.approx(known_s, rel=0.1)
    replica = Replica("a", 1, 1, [84_000_000] * 2, lambda *_: None, Storage("local", ["a"], [1, 1], 9), [])
    new_s = replica.read_s(0)
    replica.read_ahead(0, 0.0)
    replica._read(1.0)
    assert replica.read_s(0) < new_s == replica.read_s(1)


def test_affinity_keeps_replicas_evenly_busy() -> None:
    load = Load("Dynamo, flash", rate=60, duration_s=45, num_adapters=256, seed=3)
    scene = Scene(num_replicas=4, num_slots=64)
    assert placement.simulate(load, "ours", scene).max_over_mean < 1.12


def test_an_adapter_comes_sooner_from_another_nodes_cache_than_from_s3() -> None:
    sizes = [84_000_000] * 8
    s3, near = (Storage(kind, ["a", "b"], sizes, 1 << 40) for kind in ("s3", "s3 and neighbors"))
    cold = next(adapter for adapter in range(8) if not near.has("a", adapter))
    assert near.has("b", cold), "each adapter is in one cache from the start"
    assert near.fetch("a", cold, 0.0) < s3.fetch("a", cold, 0.0) / 2
    assert (near.near_bytes, near.s3_bytes, s3.near_bytes, s3.s3_bytes) == (sizes[0], 0, 0, sizes[0])
    near.empty("b")
    near.fetch("a", cold, 9.0)
    assert near.s3_bytes == sizes[0]
    near.store("b", cold)
    assert near.has("b", cold)


def test_a_full_cache_loses_what_was_used_longest_ago() -> None:
    storage = Storage("s3", ["a"], [10] * 4, 25)
    kept = [adapter for adapter in range(4) if storage.has("a", adapter)]
    assert len(kept) == 2
    storage.has("a", kept[0])
    other = next(adapter for adapter in range(4) if adapter not in kept)
    storage.store("a", other)
    assert [adapter for adapter in range(4) if storage.has("a", adapter)] == sorted([kept[0], other])


def test_prefetching_refills_the_memory_of_a_new_node() -> None:
    """Without prefetching, a replica only reads what requests need, and they wait for it."""
    load = Load("Dynamo, steady", rate=60, duration_s=40, num_adapters=512, seed=1)
    scene = Scene("s3", 128 << 30, new_node_s=30.0)
    refilled, alone = (placement.simulate(load, arm, scene) for arm in ("ours", "ours, not prefetched"))
    assert refilled.read_gb > alone.read_gb and refilled.p99_s < alone.p99_s


def test_bounds_count_the_reads_that_nothing_avoids() -> None:
    adapters = [0, 1, 0, 2, 0, 1]
    assert placement_bound.first(adapters) == [True, True, False, True, False, False]
    assert placement_bound.belady([0, 1, 2, 0, 1, 2], places=2) == [True, True, True, False, False, True]
    assert placement_bound.ahead(adapters, places=2) == [False, False, False, True, False, False]


def test_no_rule_beats_the_bound() -> None:
    load = Load("Dynamo, steady", rate=20, duration_s=40, num_adapters=4096, seed=1)
    arrivals, ranks = draw(load), placement.placement_workloads.ranks(load)
    missed = placement_bound.first([arrival.adapter for arrival in arrivals])
    bound_s = placement_bound.p99_s(arrivals, ranks, missed, placement_bound.SOURCES["disk"])
    assert placement.simulate(load, "clairvoyant").p99_s >= bound_s


def test_each_stream_of_a_closed_loop_sends_its_next_call_when_the_last_one_is_answered() -> None:
    calls = [Arrival(0.0, 16, 200, number % 4) for number in range(1000)]
    load = Load("", 1.0, 20.0, 4, 0)
    scene = Scene(num_replicas=1, warm_up_s=0.0)
    result = placement.simulate_arrivals([], load, "ours", scene, [placement.Loop(0.0, 20.0, calls, 8)])
    assert result.tokens_per_s == pytest.approx(8 / step_s(8), rel=0.1), "eight streams generate all the time"
    assert result.num_reads == 4
