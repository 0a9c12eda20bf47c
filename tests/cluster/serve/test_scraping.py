from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from lorafleet.api.telemetry.http_metrics import Metrics, Stopwatch, text_of
from lorafleet.cluster.directory.directory_metrics import DirectoryCounts, render
from lorafleet.cluster.serve.scraping import merge, scrape_all
from lorafleet.protocol.messages import EngineStats

COUNTS = DirectoryCounts(5, 2, 3, 4, 60, 0.5, 2, 3, 6, 7_000_000, 1, 9)


def rendered(replica: str, adapter: str) -> bytes:
    metrics = Metrics(lambda: EngineStats(num_running=len(adapter)), "base", replica)
    metrics.count_request("/v1/completions", adapter, 200)
    metrics.count_sequence(adapter, 3, 2, Stopwatch(), "stop")
    return text_of(list(metrics.collect()))


def samples(text: bytes) -> dict[str, dict[str, float]]:
    """By metric, with the parser's own check that each metric comes once and in one piece."""
    families = list(text_string_to_metric_families(text.decode()))
    assert len({family.name for family in families}) == len(families)
    return {
        family.name: {str(sorted(s.labels.items())) + s.name: s.value for s in family.samples} for family in families
    }


def test_merged_metrics_are_those_of_all_each_metric_in_one_piece() -> None:
    one, two = rendered("r1", "sql"), rendered("r2", "support")
    merged = merge([one, two])
    for name, values in samples(one).items():
        assert samples(merged)[name].items() >= values.items()
    assert sum(map(len, samples(merged).values())) == sum(len(v) for t in (one, two) for v in samples(t).values())
    helps = [line for line in merged.decode().splitlines() if line.startswith("# HELP")]
    assert len(helps) == len(set(helps))


class Replicas:
    """A handle, of which some replicas answer, some fail and some are silent."""

    def __init__(self, *answers: object, silent: bool = False) -> None:
        self._answers = answers
        self._silent = silent

    def broadcast(self, method: str) -> Replicas:
        assert method == "render_metrics"
        return self

    async def results_async(self, *, timeout_s: float, return_exceptions: bool) -> list[Any]:
        assert timeout_s and return_exceptions
        if self._silent:
            await asyncio.sleep(0)
            raise TimeoutError
        return list(self._answers)


async def test_a_scrape_says_when_a_replica_is_missing() -> None:
    one, two = rendered("r1", "sql"), rendered("r2", "support")

    async def own() -> bytes:
        return one

    async def directory() -> bytes:
        return render(COUNTS)

    async def complete(handle: Replicas) -> tuple[float, set[str]]:
        found = samples(await scrape_all(handle, own, directory))
        running = found["vllm:num_requests_running"]
        [value] = found["lorafleet_scrape_complete"].values()
        return value, {name.split("'")[3] for name in running}

    assert await complete(Replicas(one, two)) == (1.0, {"r1", "r2"})
    assert await complete(Replicas(one, RuntimeError("gone"))) == (0.0, {"r1"})
    assert await complete(Replicas(silent=True)) == (0.0, {"r1"})


async def test_the_directory_is_part_of_the_scrape_and_missed_where_it_is_silent() -> None:
    one = rendered("r1", "sql")

    async def own() -> bytes:
        return one

    async def answers() -> bytes:
        return render(COUNTS)

    async def fails() -> bytes:
        raise ConnectionError("it is being restarted")

    found = samples(await scrape_all(Replicas(one), own, answers))
    shown = {name.removeprefix("lorafleet_directory_"): list(values.values()) for name, values in found.items()}
    for field in msgspec.structs.fields(DirectoryCounts):
        assert shown[field.name][0] == getattr(COUNTS, field.name)
    assert list(found["lorafleet_scrape_complete"].values()) == [1.0]
    found = samples(await scrape_all(Replicas(one), own, fails))
    assert list(found["lorafleet_scrape_complete"].values()) == [0.0]
    assert "lorafleet_directory_adapters" not in found
    assert "vllm:num_requests_running" in found
