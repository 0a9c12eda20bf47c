import pytest

import placement
import placement_arms
from placement_workloads import WORKLOADS, Load, draw
from simulated_replica import STEPS_S, step_s


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
