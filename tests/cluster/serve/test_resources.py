import os

import pytest

from lorafleet.cluster.config import AppArgs, parse_args
from lorafleet.cluster.serve.resources import (
    FRONT_CPUS,
    check_gpus,
    num_fitting,
    replica_bundles,
    surge_percent,
    with_cpu_threads,
)
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import ConfigError


def args(**values: object) -> AppArgs:
    return parse_args({"model": "m"} | values)


def test_a_replica_has_a_bundle_for_its_front_and_one_for_each_rank():
    assert replica_bundles(args(num_cpus=2), "cpu") == [{"CPU": FRONT_CPUS}, {"CPU": 2.0}]
    rank = {"CPU": 2.0, "GPU": 1.0}
    assert replica_bundles(args(num_cpus=2, tp=3), "cuda") == [{"CPU": FRONT_CPUS}, rank, rank, rank]


@pytest.mark.parametrize(
    ("free", "num"),
    [
        ([], 0),
        ([{"CPU": 8.0}], 0),
        ([{"CPU": 8.0, "GPU": 3.0}], 1),
        ([{"CPU": 2.1, "GPU": 2.0}], 1),
        ([{"CPU": 2.0, "GPU": 2.0}], 0),
        ([{"CPU": 4.2, "GPU": 8.0}, {"CPU": 64.0, "GPU": 1.0}, {"CPU": 64.0, "GPU": 5.0}], 4),
    ],
)
def test_a_replica_fits_where_one_node_has_all_that_it_needs(free, num):
    assert num_fitting(replica_bundles(args(num_cpus=1, tp=2), "cuda"), free) == num


@pytest.mark.parametrize(
    ("wanted", "running", "fitting", "percent"),
    [
        (1, 1, 0, 0),  # The only replica stops before the next one starts.
        (1, 1, 1, 100),
        (1, 2, 1, 100),
        (2, 1, 1, 0),  # The second one takes the room: nothing is left beside.
        (2, 1, 2, 50),
        (2, 1, 9, 100),
        (3, 3, 1, 33),
        (8, 8, 3, 37),
        (200, 200, 1, 1),
    ],
)
def test_as_many_replicas_start_beside_the_former_ones_as_there_is_room_for(wanted, running, fitting, percent):
    assert surge_percent(wanted, running, fitting) == percent
    num_beside = -(-percent * wanted // 100)  # as Serve rounds
    assert num_beside <= max(0, fitting - max(0, wanted - running)) or percent == 1


@pytest.mark.parametrize(
    ("num_replicas", "tp", "num_gpus"),
    [(1, 1, [1]), (3, 1, [1, 2]), (2, 4, [8]), (3, 2, [3, 4]), (1, 8, [0, 8]), (2, 3, [4, 4, 2])],
)
def test_replicas_that_fit_are_accepted(num_replicas, tp, num_gpus):
    check_gpus(args(num_replicas=num_replicas, tp=tp), num_gpus)


@pytest.mark.parametrize(
    ("num_replicas", "tp", "num_gpus", "complaint"),
    [
        (2, 1, [1], "num_replicas=2 .*needs 2 GPUs; this Ray cluster has 1"),
        (2, 4, [4, 2], "tensor_parallel_size=4 .*needs 8 GPUs; this Ray cluster has 6"),
        (1, 2, [1, 1], "needs 2 GPUs on one node for each replica; .*nodes have 1, 1"),
        (3, 3, [4, 4, 2], "needs 3 GPUs on one node"),
    ],
)
def test_replicas_that_do_not_fit_are_refused(num_replicas, tp, num_gpus, complaint):
    with pytest.raises(ConfigError, match=complaint):
        check_gpus(args(num_replicas=num_replicas, tp=tp, device="cuda"), num_gpus)


def test_the_ranks_of_all_replicas_share_the_cores(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 16)

    def threads(num_replicas: int, **fields: object) -> int | None:
        return with_cpu_threads(EngineConfig("m", **fields), num_replicas).cpu_threads

    assert threads(2, device="cpu") == 8
    assert threads(2, device="cpu", tensor_parallel_size=4) == 2
    assert threads(8, device="cpu", tensor_parallel_size=4) == 1
    assert threads(2, device="cpu", tensor_parallel_size=4, cpu_threads=5) == 5
    assert threads(2, device="cuda", tensor_parallel_size=4) is None
