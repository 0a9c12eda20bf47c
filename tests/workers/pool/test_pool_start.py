"""The shares of memory at the start, and where it cannot be shared."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.errors import ConfigError, NothingToShare
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.workers import base_startup, rank_startup
from lorafleet.workers.attention import select
from lorafleet.workers.attention.attention_backend import AttentionSpec, LayerAttention
from lorafleet.workers.pool import pool_start
from lorafleet.workers.pool.group_layout import PAGE_BYTES
from lorafleet.workers.pool.pool_shares import PoolBounds, PoolShares
from lorafleet.workers.pool.pool_start import start_pool
from lorafleet.workers.startup import build_engine

BLOCK_BYTES = [PAGE_BYTES // 4] * 2  # Groups have 4 blocks and two pages.
GROUP = 2 * PAGE_BYTES


def shares(
    num_blocks: int = 399,
    kept: int = 39,
    promised: int = 10,
    most: int = 1000,
    exact: bool = False,
    rounds_up: bool = False,
) -> PoolShares:
    """The shares of adapters with 2 groups of their own, and of a KV cache beside those that they are `promised`."""
    bounds = PoolBounds(2 * GROUP, promised * GROUP, most * GROUP, exact)
    return PoolShares.of(BLOCK_BYTES, bounds, num_blocks, kept, rounds_up=rounds_up)


def test_the_kv_cache_gets_what_is_promised_to_adapters_which_may_borrow_half_of_all() -> None:
    found = shares()
    assert found.layout.num_blocks == 432, "100 groups of the KV cache, and 8 that are promised"
    assert (found.most_lent, found.promised, found.num_lendable) == (53, 8, 106)


def test_a_bound_of_the_user_is_kept() -> None:
    found = shares(promised=30, exact=True)
    assert (found.most_lent, found.promised, found.num_lendable) == (28, 28, 56)


def test_no_more_is_lent_than_the_adapters_in_all_slots_could_use() -> None:
    assert shares(most=20).most_lent == 19
    assert shares(promised=30, most=20, exact=True).most_lent == 19


def test_the_longest_sequence_keeps_its_blocks() -> None:
    found = shares(kept=399)
    assert found.most_lent == 8
    blocks = found.layout.num_blocks - 1 - found.most_lent * found.layout.blocks
    assert blocks >= 399
    assert shares(kept=410).most_lent == 5


def test_nothing_is_lent_where_the_longest_sequence_needs_all() -> None:
    assert shares(kept=399, promised=2).most_lent == 0
    assert shares(num_blocks=7, kept=1, promised=2).most_lent == 0, "the first and the last group stay"


@pytest.mark.parametrize("num_blocks", range(396, 404))
def test_a_cache_of_an_exact_size_is_never_smaller(num_blocks: int) -> None:
    found = shares(num_blocks, promised=2, rounds_up=True)
    assert num_blocks <= found.layout.num_blocks - 1 < num_blocks + 4
    assert shares(num_blocks, promised=2).layout.num_blocks - 1 <= num_blocks


@pytest.mark.parametrize(
    ("device", "num_ranks", "block_bytes", "why"),
    [
        ("cpu", 1, BLOCK_BYTES, "host memory"),
        ("cuda:0", 2, BLOCK_BYTES, "tensor_parallel_size is 2"),
        ("cuda:0", 1, [18432] * 61, "have to move at a time"),
        ("cuda:0", 1, [], "have to move at a time"),
    ],
)
def test_memory_is_not_shared_silently_where_it_cannot_be(
    device: str, num_ranks: int, block_bytes: list[int], why: str
) -> None:
    with pytest.raises(ConfigError, match=f"share_lora_memory cannot be used: .*{why}"):
        start_pool(LoRAConfig(share_lora_memory=True), num_ranks, torch.device(device), block_bytes)


@pytest.mark.parametrize("lora", [None, LoRAConfig(share_lora_memory=False), LoRAConfig(lora_memory_gib=4)])
def test_shares_are_fixed_without_adapters_and_where_the_user_has_set_them(lora: LoRAConfig | None) -> None:
    assert start_pool(lora, 1, torch.device("cuda:0"), BLOCK_BYTES) is None


def test_shares_are_fixed_by_default_where_memory_cannot_be_shared(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert start_pool(LoRAConfig(), 2, torch.device("cuda:0"), BLOCK_BYTES) is None
    assert "adapters and KV blocks have fixed shares of memory: " in caplog.text


def test_a_cpu_says_nothing_of_memory_that_only_gpus_can_share(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert start_pool(LoRAConfig(), 1, torch.device("cpu"), BLOCK_BYTES) is None
    assert caplog.text == ""


def test_memory_is_shared_by_default_unless_something_speaks_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        def has_virtual_memory(self, _: int) -> bool:
            return True

    monkeypatch.setattr(pool_start, "CudaDriver", Driver)
    place = 1, torch.device("cuda:0"), BLOCK_BYTES
    assert start_pool(LoRAConfig(), *place) is not None
    assert start_pool(LoRAConfig(), *place, "a model drafts") is None
    assert start_pool(LoRAConfig(share_lora_memory=True, lora_memory_gib=4), *place, "a model drafts") is not None


@pytest.mark.parametrize(
    ("name", "has_fixed_order", "expected"),
    [("auto", False, True), ("flashinfer", False, True), ("triton", False, False), ("auto", True, False)],
)
def test_flashinfer_speaks_against_sharing_only_if_it_would_serve(
    monkeypatch: pytest.MonkeyPatch, name: str, has_fixed_order: bool, expected: bool
) -> None:
    monkeypatch.setattr(select, "_layer_refusal", lambda *_: None)
    spec = AttentionSpec((LayerAttention(4, 2, 64, 64),), 16, torch.float16, torch.float16, torch.device("cuda:0"))
    assert select.may_use_flashinfer(spec, name, has_fixed_order=has_fixed_order) is expected


class EmptyPool(pool_start.PoolStart):
    """A pool whose KV cache has nothing to lend, without a GPU's memory. Its adapters have memory for one of them."""

    def __init__(self, *_: object) -> None:
        self.arena = self.groups = self.shares = self._bounds = None

    def own_bytes(self, _: LoRAConfig, largest: int) -> int:
        return largest

    def divide(self, *_: int, rounds_up: bool) -> int:
        raise NothingToShare(f"nothing can be lent, rounds_up={rounds_up}")


def test_an_engine_without_memory_to_share_has_fixed_shares_and_reads_its_weights_once(
    monkeypatch: pytest.MonkeyPatch, fleet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    loads: list[object] = []

    def load(*arguments: object) -> object:
        loads.append(arguments)
        return load_model(*arguments)

    load_model = base_startup.load_model
    monkeypatch.setattr(base_startup, "load_model", load)
    config = EngineConfig(str(fleet("llama3").base), device="cpu", kv_cache_tokens=512, lora=LoRAConfig(max_loras=3))
    fixed = rank_startup.build_rank(config)
    monkeypatch.setattr(rank_startup, "start_pool", EmptyPool)
    loads.clear()
    rank = rank_startup.build_rank(config)
    assert len(loads) == 1 and rank.pool is None and "nothing can be lent" in caplog.text
    for built in (fixed, rank):
        assert built.slots is not None and built.loader is not None
        built.loader.stop()
    memory, right = rank.slots.policy.memory, fixed.slots.policy.memory
    assert (memory.num_bytes, memory.most_bytes, memory.free_ranges) == (
        right.num_bytes,
        right.most_bytes,
        right.free_ranges,
    )
    assert rank.num_blocks == fixed.num_blocks
    with pytest.raises(NothingToShare):
        rank_startup.build_rank(replace(config, lora=LoRAConfig(share_lora_memory=True)))


def test_an_engine_on_a_cpu_does_not_start_with_shared_memory(fleet) -> None:
    config = EngineConfig(str(fleet("llama3").base), device="cpu", lora=LoRAConfig(share_lora_memory=True))
    with pytest.raises(ConfigError, match="host memory"):
        build_engine(config)
