"""Ray's start waits for a raylet that is slow, and not for one that has ended."""

from __future__ import annotations

from typing import Any

import pytest
from ray._private import services

from lorafleet.cluster import patience
from lorafleet.cluster.patience import patient_start, wait_for


class SlowRaylet:
    """Registers after so many seconds of its own clock, which only sleeps move."""

    def __init__(self, takes_s: float, ends_s: float = 1e9) -> None:
        self.now = 0.0
        self.takes_s = takes_s
        self.ends_s = ends_s
        self.reports: list[str] = []

    def get_node(self, *_: object) -> dict[str, Any]:
        if self.now < self.takes_s:
            raise RuntimeError("This node has not registered")
        return {"NodeID": "n"}

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, wait_s: float) -> Any:
        runs = lambda: self.now < self.ends_s  # noqa: E731
        return wait_for(self.get_node, wait_s, runs, self.reports.append, lambda: self.now, self.sleep)


@pytest.mark.parametrize(("takes_s", "num_reports"), [(0.0, 0), (5.0, 0), (200.0, 1)])
def test_a_slow_raylet_is_waited_for_and_that_is_said_once(takes_s: float, num_reports: int) -> None:
    raylet = SlowRaylet(takes_s)
    assert raylet.wait(240.0) == {"NodeID": "n"}
    assert len(raylet.reports) == num_reports
    assert all("waiting for Ray's raylet, for at most 240 s" in report for report in raylet.reports)


@pytest.mark.parametrize(("raylet", "until_s"), [(SlowRaylet(1e9), 240.0), (SlowRaylet(1e9, ends_s=20.0), 20.0)])
def test_one_that_is_too_slow_or_has_ended_is_given_up(raylet: SlowRaylet, until_s: float) -> None:
    with pytest.raises(RuntimeError, match="has not registered"):
        raylet.wait(240.0)
    assert until_s <= raylet.now < until_s + 2


def test_rays_own_question_is_the_one_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    raylet = SlowRaylet(0.0)
    monkeypatch.setattr(services, "get_node", raylet.get_node)
    monkeypatch.setattr(patience, "_raylet_runs", lambda: False)
    with patient_start(240.0, raylet.reports.append):
        assert services.get_node("address", "n") == {"NodeID": "n"}
        raylet.takes_s = 1e9
        with pytest.raises(RuntimeError):
            services.get_node("address", "n")
    assert services.get_node == raylet.get_node
