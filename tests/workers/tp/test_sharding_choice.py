"""The choice between the layouts of adapters, where fully_sharded_loras is not set."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lorafleet.kernels.lora.lora_tuning import FOLDER
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.workers.tp.group import TPGroup
from lorafleet.workers.tp.sharding_choice import (
    SUFFIX,
    MeasuredSteps,
    choose,
    read_steps,
    with_sharding,
    with_sharding_of,
    write_steps,
)
from ranks import on_ranks

H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"


def test_the_smallest_measured_batch_that_is_large_enough_decides() -> None:
    steps = [MeasuredSteps(64, 5.0, 5.1), MeasuredSteps(1, 3.0, 2.5), MeasuredSteps(8, 3.2, 2.9)]
    assert [choose(steps, most) for most in (1, 2, 8)] == [False, False, False]
    assert [choose(steps, most) for most in (9, 64, 1024)] == [True, True, True]
    assert choose([], 8) is None


def test_larger_adapters_must_be_worth_their_memory() -> None:
    assert [choose([MeasuredSteps(8, 1.0, ms)], 8) for ms in (0.96, 0.98, 1.0, 1.1)] == [False, True, True, True]


@pytest.mark.parametrize("gpu", [H200, H100])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_small_replicas_of_measured_gpus_use_the_layout_without_an_exchange(gpu: str, num_ranks: int) -> None:
    chosen = {most: with_sharding(LoRAConfig(), gpu, num_ranks, most).fully_sharded_loras for most in (1, 8, 64, 256)}
    assert chosen == {1: False, 8: False, 64: True, 256: True}


def test_every_file_of_measured_steps_can_be_read() -> None:
    paths = list(FOLDER.glob(f"*{SUFFIX}"))
    assert paths
    for path in paths:
        for size, steps in read_steps(path).items():
            assert size > 1
            assert len({step.batch for step in steps}) == len(steps) > 0


def test_what_is_set_or_was_not_measured_stays() -> None:
    for lora in (LoRAConfig(fully_sharded_loras=True), LoRAConfig(fully_sharded_loras=False)):
        assert with_sharding(lora, H200, 2, 1) == lora
    unset = LoRAConfig()
    for gpu, num_ranks in ((None, 2), ("another GPU", 2), (H200, 3), (H200, 1)):
        assert with_sharding(unset, gpu, num_ranks, 1) == unset


def test_steps_that_are_measured_later_replace_those_of_the_same_size_only(tmp_path) -> None:
    path = tmp_path / "tuned" / "GPU.sharding.json"
    first, second = [MeasuredSteps(1, 3.0, 2.5)], [MeasuredSteps(1, 2.0, 2.1), MeasuredSteps(8, 2.5, 2.4)]
    write_steps(path, {2: first, 4: first})
    write_steps(path, {4: second})
    assert read_steps(path) == {2: first, 4: second}
    assert read_steps(tmp_path / "none.json") == {}


def chosen_on_rank(group: TPGroup, disagree: bool) -> bool | None:
    lora = LoRAConfig(fully_sharded_loras=group.rank == 0 if disagree else None)
    return with_sharding_of(lora, group, torch.device("cpu"), 8).fully_sharded_loras


def test_all_ranks_choose_the_same() -> None:
    assert on_ranks(2, chosen_on_rank, True) == [False, False]
    assert on_ranks(2, chosen_on_rank, False) == [False, False]
    alone = LoRAConfig()
    assert with_sharding_of(alone, TPGroup(), torch.device("cpu"), 8) == replace(alone)
