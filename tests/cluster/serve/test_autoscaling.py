from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from openai import AsyncOpenAI

from lorafleet.cluster.config import parse_args
from lorafleet.cluster.serve.autoscaling import LoadPolicy, autoscaling_metrics, wanted_replicas
from lorafleet.protocol.errors import ConfigError
from lorafleet.protocol.messages import EngineStats
from tests.cluster.harness import START_S, RunningServer, serving

pytestmark = pytest.mark.xdist_group("own_server")


def test_a_replica_is_as_busy_as_the_fullest_of_what_it_can_run_out_of() -> None:
    by_sequences = EngineStats(num_running=60, num_waiting=4, running_tokens=1000, waiting_tokens=100)
    assert autoscaling_metrics(by_sequences, 64, 100_000)["busy"] == 1.0
    by_tokens = EngineStats(num_running=4, running_tokens=90_000, waiting_tokens=60_000)
    assert autoscaling_metrics(by_tokens, 64, 100_000)["busy"] == 1.5


def test_adapters_are_counted_over_slots_and_a_base_without_adapters_has_none() -> None:
    stats = EngineStats(num_running=1, lora_in_use_limit=4, lora_adapters_wanted=6)
    assert autoscaling_metrics(stats, 64, 1000)["adapters"] == 1.5
    assert autoscaling_metrics(EngineStats(num_running=1), 64, 1000)["adapters"] == 0.0


@pytest.mark.parametrize(
    ("busy", "adapters", "wanted"),
    [([0.0, 0.0], [0, 0], 1), ([0.7, 0.7], [0, 0], 2), ([2.1, 0.0], [0, 0], 3), ([0.1, 0.1], [3.0, 1.0], 4)],
)
def test_replicas_follow_what_is_scarcest(busy: list[float], adapters: list[float], wanted: int) -> None:
    assert wanted_replicas(busy, adapters, target=0.7) == pytest.approx(wanted)


def test_nothing_changes_before_the_replicas_have_told_something() -> None:
    assert LoadPolicy(0.7)(SimpleNamespace(aggregated_metrics=None, target_num_replicas=3)) == (3, {})
    told = {"busy": {"a": 1.4}, "adapters": {"a": 0.5}}
    assert LoadPolicy(0.7)(SimpleNamespace(aggregated_metrics=told, target_num_replicas=1)) == (2.0, {})


def test_less_than_num_replicas_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_replicas=2 is below num_replicas=3"):
        parse_args({"model": "m", "num_replicas": 3, "max_replicas": 2})


def test_replicas_come_under_load_and_go_after_it(tiny_model: Path, tmp_path: Path) -> None:
    arguments = [
        "--model",
        str(tiny_model),
        "--served-model-name",
        "base",
        "--max-replicas",
        "2",
        "--max-num-seqs",
        "2",
    ]
    arguments += ["--upscale-delay-s", "1", "--downscale-delay-s", "2", "--kv-cache-tokens", "4096"]

    async def drive(server: RunningServer) -> None:
        async def until(count: int) -> None:
            deadline_s = time.monotonic() + START_S
            while (workers := len(server.processes("WorkerActor"))) != count:
                assert time.monotonic() < deadline_s, f"{workers} workers, not {count}"
                await asyncio.sleep(0.2)

        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as client:

            async def ask_on() -> None:
                while True:
                    await client.completions.create(
                        model="base", prompt="hello", max_tokens=400, extra_body={"ignore_eos": True}
                    )

            await until(1)
            asking = [asyncio.create_task(ask_on()) for _ in range(8)]
            await until(2)
            for one in asking:
                one.cancel()
            failures = [
                one for one in await asyncio.gather(*asking, return_exceptions=True) if isinstance(one, Exception)
            ]
            assert failures == []
        await until(1)

    with serving(arguments, tmp_path / "serve.log") as server:
        asyncio.run(drive(server))
