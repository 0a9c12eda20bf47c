"""What a router learns from the KV events of a real engine is what the engine's prefix cache has."""

from __future__ import annotations

import random

import pytest

from engine_steps import step_until_done
from family_cases import CASES, make_case
from lorafleet.protocol.engine_config import EngineConfig
from lorafleet.protocol.engine_control import FlushPrefixes
from lorafleet.protocol.errors import ConfigError
from lorafleet.protocol.kv_events_config import KVEventsConfig
from lorafleet.protocol.lora_config import LoRAConfig
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.protocol.messages import EngineRequest
from lorafleet.protocol.sampling_params import SamplingParams
from lorafleet.workers.startup import build_engine
from tests.workers.kv_events.ports import free_ports
from tests.workers.kv_events.subscriber import AllBlocksCleared, Index, Subscriber

BLOCK = 4


def events_at(port: int) -> KVEventsConfig:
    return KVEventsConfig(
        enable_kv_cache_events=True,
        endpoint=f"tcp://127.0.0.1:{port}",
        replay_endpoint=f"tcp://127.0.0.1:{port + 1}",
        topic="kv@here@tiny",
    )


class PublishingEngine:
    """A small engine that is stepped by hand, and all sequences that it has answered."""

    def __init__(self, made, overlap: bool, kv_host_gib: float) -> None:
        port = free_ports(2)
        config = EngineConfig(
            model=str(made.base),
            block_size=BLOCK,
            kv_cache_tokens=160,
            max_model_len=96,
            max_num_batched_tokens=48,
            max_num_seqs=6,
            lora=LoRAConfig(max_loras=2),
            async_scheduling=overlap,
            kv_host_gib=kv_host_gib,
            kv_events=events_at(port),
        )
        self.engine = build_engine(config)
        self.subscriber = Subscriber(port, "kv@", replay_port=port + 1)
        self.done: list[tuple[list[int], str, str]] = []  # Tokens, digest and cache salt.

    def load(self, name: str, path) -> LoRARequest:
        loading = self.engine.load_adapter(LoRARequest(name, 1, str(path)))
        step_until_done(self.engine, loading)
        return LoRARequest(name, 1, str(path), loading.result().digest)

    def answer(self, jobs: list[tuple[list[int], LoRARequest | None, str]]) -> None:
        params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
        tokens = {}
        for number, (ids, lora, salt) in enumerate(jobs):
            self.engine.add(
                EngineRequest(request_id=str(number), prompt_token_ids=ids, params=params, lora=lora, cache_salt=salt)
            )
            tokens[str(number)] = list(ids)
        while self.engine.has_work:
            for output in self.engine.step():
                assert output.error is None
                tokens[output.request_id] += output.token_ids
        for number, (_, lora, salt) in enumerate(jobs):
            self.done.append((tokens[str(number)], "" if lora is None else lora.digest, salt))

    def index(self) -> Index:
        """What a router that joins now learns from a replay."""
        index, expected = Index(), 0
        while True:
            for topic, number, batch in self.subscriber.replay(expected):
                assert (topic, number, batch.data_parallel_rank) == (b"kv@here@tiny", expected, 0)
                index.apply(batch)
                expected += 1
            if expected == self.engine.stats().kv_events.batches:
                return index

    def cached_blocks(self, tokens: list[int], digest: str, salt: str) -> int:
        kv = self.engine.scheduler.kv
        blocks = kv.open((salt, digest, self.engine.runner.memory.base.digest))
        found = kv.find_prefix(blocks, tokens)
        kv.release(blocks)
        return len(found.table)

    def close(self) -> None:
        self.subscriber.close()
        self.engine.close()


@pytest.fixture(params=[(False, 0.0), (True, 0.0), (True, 0.01)], ids=["one-step", "overlapping", "host-tier"])
def publishing(request, fleet):
    made = PublishingEngine(fleet("llama3"), *request.param)
    yield made
    made.close()


def test_replayed_events_are_exactly_the_cached_blocks(publishing, fleet, prompt):
    adapters = fleet("llama3").adapters
    loras = [None, publishing.load("sql", adapters["all"]), publishing.load("~acme/chat", adapters["qv"])]
    draw = random.Random(5)
    shared = prompt(20)
    for _ in range(4):  # More than the cache holds, and more at once than it has blocks for.
        jobs = []
        for _ in range(6):
            ids = shared[: draw.choice((8, 16, 20))] + prompt(draw.randint(1, 12))
            jobs.append((ids, draw.choice(loras), ""))
        publishing.answer([*jobs, jobs[0]])
        index = publishing.index()
        for tokens, digest, salt in publishing.done:
            assert index.num_blocks(tokens, digest, BLOCK) == publishing.cached_blocks(tokens, digest, salt)
        # No prefix is published beside those that a request can find.
        prefixes = {
            (*tokens[: end * BLOCK], digest)
            for tokens, digest, _ in publishing.done
            for end in range(1, index.num_blocks(tokens, digest, BLOCK) + 1)
        }
        assert len(prefixes) == index.num_prefixes()
    assert index.names.keys() == set(index.hashes.values())
    stats = publishing.engine.stats()
    assert stats.preemptions_total > 0
    assert stats.kv_events.dropped == 0
    assert index.seen == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
    assert set(index.names.values()) <= {None, "sql", "~acme/chat"}
    assert len(set(index.names.values())) > 1
    publishing.engine.control(FlushPrefixes())
    publishing.engine.step()
    assert not publishing.index().hashes


def test_blocks_of_another_salt_have_other_hashes(publishing, prompt):
    ids = prompt(12)
    publishing.answer([(ids, None, "")])
    without = publishing.index()
    publishing.answer([(ids, None, "of a tenant")])
    both = publishing.index()
    assert len(both.names) == 2 * len(without.names)


def test_a_subscriber_gets_each_step_when_it_ends(publishing, prompt):
    while not publishing.engine.stats().kv_events.batches > 1:  # Until the subscription has reached the publisher.
        publishing.answer([(prompt(30), None, "")])
    publishing.engine.control(FlushPrefixes())
    publishing.engine.step()
    number = publishing.engine.stats().kv_events.batches - 1
    received = -1
    while received < number:
        _, received, batch = publishing.subscriber.receive()
    assert [type(event) for event in batch.events] == [AllBlocksCleared]


def test_an_engine_without_a_prefix_cache_publishes_nothing_and_says_so():
    with pytest.raises(ConfigError, match="no use with enable_prefix_caching=False"):
        EngineConfig(model="m", enable_prefix_caching=False, kv_events=events_at(5557))


def test_recurrent_models_are_rejected(tmp_path):
    base = make_case(tmp_path, CASES["qwen3_5"])
    config = EngineConfig(model=str(base), kv_cache_tokens=1024, kv_events=events_at(free_ports(2)))
    with pytest.raises(ConfigError, match="kv_events_config: the model has recurrent layers"):
        build_engine(config)
