"""The start's error says who uses a GPU's memory, and what to change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.memory_use import MemoryUse

GIB = 1 << 30
# 90 GiB may be used.
ROOMY = MemoryUse(100 * GIB, 0.9, others=1 * GIB, weights=16 * GIB, slots=2 * GIB, step=3 * GIB, later=1 * GIB)


def explained(use: MemoryUse, needed: int) -> str:
    error = use.explained(ConfigError("The KV cache holds 0 tokens.", "max_model_len"), needed)
    assert error.param == "max_model_len"
    return error.message


def test_what_is_left_is_what_nobody_uses() -> None:
    assert ROOMY.free == 67 * GIB
    assert replace(ROOMY, others=100 * GIB).free == -32 * GIB


def test_every_user_is_named_with_its_bytes() -> None:
    said = explained(replace(ROOMY, others=80 * GIB), 4 * GIB)
    for part in (
        "The KV cache holds 0 tokens.",
        "Of this GPU's 100.00 GiB",
        "gpu_memory_utilization=0.9 allows 90.00 GiB",
        "Other processes and the driver hold 80.00 GiB",
        "weights 16.00 GiB",
        "slots and states 2.00 GiB",
        "the largest step takes 3.00 GiB",
        "1.00 GiB are set aside",
        "leaves -12.00 GiB",
        "needs at least 4.00 GiB",
    ):
        assert part in said, part


@pytest.mark.parametrize(
    ("use", "needed", "remedy"),
    [
        (replace(ROOMY, others=80 * GIB), 4 * GIB, "Stop the other processes"),
        (ROOMY, 70 * GIB, "Raise gpu_memory_utilization to 0.93 or more"),
        (replace(ROOMY, slots=70 * GIB), 20 * GIB, "Lower max_loras"),
        (replace(ROOMY, step=70 * GIB), 20 * GIB, "Lower max_num_batched_tokens"),
        (replace(ROOMY, weights=120 * GIB), 1 * GIB, "larger tensor_parallel_size"),
    ],
    ids=["other processes", "a small share", "slots", "a large step", "weights"],
)
def test_the_remedy_is_for_the_largest_part(use: MemoryUse, needed: int, remedy: str) -> None:
    said = explained(use, needed)
    assert remedy in said.rpartition("needs at least")[2]
    if remedy.startswith("Raise"):
        assert replace(use, utilization=0.93).free >= needed
