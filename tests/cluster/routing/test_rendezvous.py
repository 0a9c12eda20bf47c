import os
import subprocess
import sys
from collections import Counter

import pytest

from lorafleet.cluster.routing.rendezvous import Rendezvous, key_of

KEYS = [key_of(f"adapter-{i}") for i in range(4000)]


def alike(count: int) -> dict[str, float]:
    return {f"r{i}": 1.0 for i in range(count)}


def homes(weights: dict[str, float]) -> list[str]:
    made = Rendezvous(weights)
    return [made.replicas[made.home(key)] for key in KEYS]


def test_every_process_computes_the_same_home() -> None:
    code = (
        "from lorafleet.cluster.routing.rendezvous import Rendezvous, key_of\n"
        "made = Rendezvous({f'r{i}': 1.0 for i in range(7)})\n"
        "print([made.order(key_of(f'adapter-{i}'), 3) for i in range(50)])"
    )
    others = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    made = Rendezvous(alike(7))
    assert others == {str([made.order(key_of(f"adapter-{i}"), 3) for i in range(50)]) + "\n"}


def test_homes_are_spread_evenly() -> None:
    counts = Counter(homes(alike(8)))
    assert len(counts) == 8
    assert max(counts.values()) < 1.2 * len(KEYS) / 8


def test_a_replica_that_goes_moves_only_its_own_keys() -> None:
    before = homes(alike(8))
    after = homes(alike(7))
    assert all(new == old for old, new in zip(before, after, strict=True) if old != "r7")
    taken = Counter(new for old, new in zip(before, after, strict=True) if old == "r7")
    assert len(taken) == 7, "all survivors take some"


def test_a_growing_weight_only_draws_keys_towards_it() -> None:
    last = homes(alike(4))
    for weight in (0.1, 0.3, 1.0):
        now = homes(alike(4) | {"new": weight})
        assert all(new in (old, "new") for old, new in zip(last, now, strict=True))
        assert now.count("new") / len(KEYS) == pytest.approx(weight / (4 + weight), rel=0.2)
        last = now


def test_the_order_begins_with_the_home_and_goes_on_without_it() -> None:
    made, without = Rendezvous(alike(8)), Rendezvous(alike(7))
    for key in KEYS[:200]:
        order = made.order(key, 8)
        assert order[0] == made.home(key)
        assert sorted(order) == list(range(8))
        assert made.order(key, 3) == order[:3]
        assert [made.replicas[i] for i in order if made.replicas[i] != "r7"] == [
            without.replicas[i] for i in without.order(key, 7)
        ]
