"""Damaged, hostile and unsupported adapters: each is refused at once, with its error class and the cause named."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from lorafleet.protocol.errors import AdapterChanged, AdapterMalformed, RankTooLarge
from tests.workers.adapters.bad_adapters.cases import CASES
from tests.workers.adapters.bad_adapters.damage import CANARY


@pytest.mark.parametrize("case", CASES)
def test_bad_adapter_is_refused_at_once_and_by_name(adapter: Any, case: str) -> None:
    damage, error, words = CASES[case]
    damage(adapter)
    start = time.thread_time()
    with pytest.raises(error) as caught:
        adapter.load()
    assert time.thread_time() - start < 30  # of CPU: the largest take 1 s, and CI's cores are slow and shared
    assert type(caught.value) is error
    assert caught.value.message.startswith("adapter 'sql'")
    assert words in caught.value.message
    assert len(caught.value.message) < 700
    caught.value.message.encode()
    assert not CANARY.exists()


def test_rank_over_the_limit_says_what_to_raise(make_adapter: Any) -> None:
    adapter = make_adapter(rank_pattern={"v_proj": 9})
    with pytest.raises(RankTooLarge, match=r"adapter 'sql' has rank 9; .*lora.max_lora_rank=8.* to 9 .* rank <= 8"):
        adapter.load(max_lora_rank=8)
    assert adapter.load(max_lora_rank=9).rank == 9


def test_values_that_overflow_the_serving_dtype_are_named(adapter: Any) -> None:
    adapter.map(lambda k, v: (k, v.clone().fill_(1e5) if k.endswith("2.self_attn.v_proj.lora_B.weight") else v))
    assert adapter.load(dtype=torch.bfloat16).rank == 4
    with pytest.raises(AdapterMalformed, match=r"layers.2.*up to 1e\+05.*float16"):
        adapter.load(dtype=torch.float16)


def test_a_scaling_that_overflows_the_serving_dtype_is_named(adapter: Any) -> None:
    adapter.set(lora_alpha=1e6)
    assert adapter.load(dtype=torch.float32).rank == 4
    with pytest.raises(AdapterMalformed, match="scaling 250000"):
        adapter.load(dtype=torch.float16)


def test_other_bytes_than_registered_are_refused(adapter: Any) -> None:
    digest = adapter.load().digest
    adapter.map(lambda k, v: (k, v * 2))
    with pytest.raises(AdapterChanged, match="digest"):
        adapter.load(expected_digest=digest)
