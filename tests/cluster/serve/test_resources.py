import os

import pytest

from lorafleet.cluster.config import AppArgs, parse_args
from lorafleet.cluster.serve.resources import FRONT_CPUS, check_gpus, replica_bundles, with_cpu_threads
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import ConfigError


def args(**values: object) -> AppArgs:
    return parse_args({"model": "m"} | values)


def test_a_replica_has_a_bundle_for_its_front_and_one_for_each_rank():
    assert replica_bundles(args(num_cpus=2), "cpu") == [{"CPU": FRONT_CPUS}, {"CPU": 2.0}]
    rank = {"CPU": 2.0, "GPU": 1.0}
    assert replica_bundles(args(num_cpus=2, tp=3), "cuda") == [{"CPU": FRONT_CPUS}, rank, rank, rank]


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
