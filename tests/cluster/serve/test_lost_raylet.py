"""`lorafleet serve` when Ray's raylet has ended, and all workers with it."""

from __future__ import annotations

import time

import pytest

from living import command, family, is_alive, kill
from tests.cluster.harness import START_S
from tests.cluster.one_replica import OneReplica
from tests.cluster.rays_turn import rays_turn

pytestmark = pytest.mark.xdist_group("one_replica")


def test_a_server_whose_raylet_has_ended_begins_anew_as_the_same_process(one_replica: OneReplica) -> None:
    tokens, logprobs = one_replica.neighbor()
    old, num_starts = family(one_replica.pid), one_replica.log.read_text().count("\nready: ")
    with rays_turn():
        kill(one for one in old if any(part.endswith("raylet/raylet") for part in command(one)[:1]))
        deadline_s = time.monotonic() + START_S
        while one_replica.log.read_text().count("\nready: ") == num_starts:
            assert time.monotonic() < deadline_s, one_replica.log.read_text()
            time.sleep(0.2)
    tokens_again, logprobs_again = one_replica.neighbor()
    assert tokens_again == tokens
    assert logprobs_again == pytest.approx(logprobs, abs=1e-3)
    assert [command(one) for one in old if is_alive(one)] == []
