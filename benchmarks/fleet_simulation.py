"""Predicts rows of benchmarks/fleet.py by the simulation of benchmarks/placement.py.

The caches of a row hold what the rows before it left there, as on a real server. The simulation knows no prompts that
are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import placement
import placement_arms
import placement_workloads
from lorafleet.cluster.routing.rule_names import RoutingRule
from placement import Loop, Result, Scene
from placement_workloads import Load
from slora_workload import Arrival

PAUSE_S = 5.0  # Time after the last arrival of a row until the next row.
LOOP_PAUSE_S = 15.0  # The same after a closed loop, whose queues are longer.
FIRST_RATE = 8.0  # Requests per second and replica for each adapter's first request; a disk reads as fast on average.
FRONT_S = 0.025  # Routing, HTTP, and the step that is in flight; the difference to the p50 on four H200s.
MIXED_S = 0.015  # length of a step with prompts while none is late: 0.3 of the default max_gap_ms, 50
ARMS = {  # The arm of each rule.
    rule: next(arm for arm, its_rule in placement_arms.RULES.items() if its_rule == rule)
    for rule in placement_arms.RULES.values()
}


@dataclass(frozen=True, slots=True)
class LoopLoad:
    """A closed loop of so many streams, whose calls are those of a load."""

    load: Load
    seconds: float
    num_streams: int


def predict(
    loads: Sequence[Load | LoopLoad],
    rule: RoutingRule,
    replicas: int,
    slot_bytes: int,
    max_cpu_loras: int,
    *,
    is_warm: bool,
) -> Result:
    """Returns the figures of the last load, after the others on the same server. If it `is_warm`, each adapter is
    requested once before the first load, with a prompt of one token.

    Args:
        slot_bytes: the memory for adapters in slots of each replica.
    """
    arrivals, loops = list[Arrival](), list[Loop]()
    last = _load_of(loads[-1])
    begin_s = end_s = 0.0
    if is_warm:
        rate = FIRST_RATE * replicas
        arrivals = [Arrival(number / rate, 1, 1, number) for number in range(last.num_adapters)]
        end_s = arrivals[-1].at_s + PAUSE_S
    for load in loads:
        begin_s, drawn = end_s, placement_workloads.draw(_load_of(load))
        if isinstance(load, LoopLoad):
            loops.append(Loop(begin_s, begin_s + load.seconds, drawn, load.num_streams))
            end_s = begin_s + load.seconds + LOOP_PAUSE_S
        else:
            arrivals += [replace(arrival, at_s=arrival.at_s + begin_s) for arrival in drawn]
            end_s = arrivals[-1].at_s + PAUSE_S
    scene = Scene(
        num_replicas=replicas,
        num_slots=max_cpu_loras,
        cpu_adapters=max_cpu_loras,
        slot_bytes=slot_bytes,
        mixed_s=MIXED_S,
        warm_up_s=begin_s,
        front_s=FRONT_S,
    )
    return placement.simulate_arrivals(arrivals, replace(last, duration_s=end_s), ARMS[rule], scene, loops)


def _load_of(load: Load | LoopLoad) -> Load:
    return load.load if isinstance(load, LoopLoad) else load
