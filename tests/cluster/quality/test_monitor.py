"""Probes through a real engine, front, directory and catalogue."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from lorafleet.api.routes.build_api import build_api
from lorafleet.client.admin import AsyncAdminClient
from lorafleet.cluster.directory.task_leases import TaskLeases
from lorafleet.cluster.quality.book import QualityBook
from lorafleet.cluster.quality.monitor import QualityMonitor
from lorafleet.cluster.quality.probes import Probe, ProbeSet, QualityProbes
from lorafleet.cluster.quality.quality_metrics import QualityMetrics
from lorafleet.cluster.quality.quality_records import Measures, Standing
from lorafleet.cluster.quality.routes import QualityApi
from lorafleet.cluster.tenancy.usage_sums import read_usage
from lorafleet.protocol.admin_verbs import TakeLease
from lorafleet.protocol.limits import INT32
from lorafleet.protocol.messages import EngineRequest, TokenOutput
from lorafleet.protocol.transport.unread_outputs import IsStalled
from tests.cluster.tenancy.house import House

PROBES = (Probe(prompt="one two three", completion=" four"), Probe(prompt="and then"))
INTERVAL_S = 100.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def adapters(fleet: Callable[[str], Any]) -> dict[str, Path]:
    found: dict[str, Path] = fleet("llama3").adapters
    return found


def monitor_of(house: House, clock: Clock, *models: str, replica: str = "r", for_s: float = 60.0) -> QualityMonitor:
    async def take_turn() -> bool:
        return await house.administration.carry_out(TakeLease("quality", replica, for_s))

    sets = tuple(ProbeSet(model, 6, PROBES) for model in models)
    book = QualityBook(house.directory.catalogue.store)
    return QualityMonitor(house.front, QualityProbes(INTERVAL_S, sets), book, take_turn, clock)


def measures_of(standing: Standing) -> Measures:
    assert standing.measures is not None and standing.error == ""
    return standing.measures


def shown(monitor: QualityMonitor, series: str) -> dict[str, float]:
    """By model."""
    samples = [sample for metric in QualityMetrics(monitor).collect() for sample in metric.samples]
    return {one.labels["model_name"]: one.value for one in samples if one.name == f"lorafleet_quality_{series}"}


async def test_a_model_that_has_not_changed_agrees_with_its_baseline_also_after_a_restart(
    house: House, adapters: dict[str, Path], clock: Clock
) -> None:
    async with house.open():
        assert (await house.push("operator", "sql", adapters["all"])).status_code == 200
        first = monitor_of(house, clock, "base", "sql")
        await first.look()
        baselines = {model: standing.baseline_at_s for model, standing in first.standings.items()}
        assert baselines == {"base": 1000.0, "sql": 1000.0}
    clock.now_s += INTERVAL_S
    async with house.open():
        again = monitor_of(house, clock, "base", "sql")
        await again.look()
        for model, standing in again.standings.items():
            found = measures_of(standing)
            assert (standing.baseline_at_s, standing.at_s) == (baselines[model], clock.now_s)
            assert found.agreement == 1.0 and found.drift < 1e-4 and found.kl < 1e-4
            assert found.perplexity == pytest.approx(found.baseline_perplexity, rel=1e-3)
        assert again.standings["sql"].digest == again.standings["sql"].baseline_digest != ""
        assert shown(again, "runs_total") == {"base": 1, "sql": 1}


async def test_another_version_agrees_less_until_it_is_accepted(
    house: House, adapters: dict[str, Path], clock: Clock
) -> None:
    async with house.open():
        await house.push("operator", "sql", adapters["all"])
        monitor = monitor_of(house, clock, "sql")
        await monitor.look()
        assert shown(monitor, "agreement") == {"sql": 1.0}
        assert (await house.push("operator", "sql", adapters["regex"])).status_code == 200
        clock.now_s += INTERVAL_S
        await monitor.look()
        changed = monitor.standings["sql"]
        assert changed.digest != changed.baseline_digest
        assert shown(monitor, "agreement")["sql"] == measures_of(changed).agreement < 0.8, "what the alert looks at"
        assert shown(monitor, "drift")["sql"] > 0.01 and measures_of(changed).kl > 0
        before, now = (shown(monitor, series)["sql"] for series in ("baseline_perplexity", "perplexity"))
        assert now != pytest.approx(before, rel=1e-3)
        accepted = await monitor.run("sql", accept=True)
        assert accepted.baseline_digest == changed.digest and measures_of(accepted).agreement == 1.0
        assert measures_of(await monitor.run("sql", accept=False)).agreement == 1.0


async def test_a_model_that_fails_is_counted_and_does_not_stop_the_others(
    house: House, adapters: dict[str, Path], clock: Clock
) -> None:
    async with house.open():
        await house.push("operator", "late", adapters["qv"])
        monitor = monitor_of(house, clock, "late", "base")
        await monitor.look()
        assert (await house.ask("operator", "DELETE", "/v1/adapters/late")).status_code == 200
        clock.now_s += INTERVAL_S
        await monitor.look()
        assert shown(monitor, "failures_total") == {"late": 1, "base": 0}
        assert shown(monitor, "runs_total") == {"late": 2, "base": 2}
        gone, base = await monitor.show()
        assert "late" in gone.error and (gone.tried_s, gone.at_s) == (clock.now_s, 1000.0), "its last measures stay"
        assert base.error == "" and base.at_s == clock.now_s
        clock.now_s += INTERVAL_S - 1
        await monitor.look()
        assert shown(monitor, "runs_total") == {"late": 2, "base": 2}, "before the interval is over"


async def test_one_replica_probes_at_a_time_and_another_takes_over_where_it_left_off(
    house: House, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house.open():
        monkeypatch.setattr(house.administration, "_leases", TaskLeases(clock))
        one, other = (monitor_of(house, clock, "base", replica=replica) for replica in ("r1", "r2"))
        await one.look()
        await other.look()
        assert shown(other, "runs_total") == {"base": 0} and shown(other, "agreement") == {}
        clock.now_s += 61
        await other.look()
        assert shown(other, "runs_total") == {"base": 0}, "it is not due yet"
        assert shown(other, "agreement") == {"base": 1.0}, "as the store has it"
        await one.look()
        assert shown(one, "agreement") == {}, "told by one replica only"
        clock.now_s += 40
        await other.look()
        assert shown(other, "runs_total") == {"base": 1} and shown(one, "runs_total") == {"base": 1}


async def test_probes_come_last_are_computed_anew_and_belong_to_no_tenant(
    house: House, adapters: dict[str, Path], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[EngineRequest] = []
    async with house.open():
        await house.push("acme", "sql", adapters["all"])
        generate = house.engine.generate

        def noting(request: EngineRequest, _is_stalled: IsStalled) -> AsyncGenerator[TokenOutput, None]:
            asked.append(request)
            return generate(request)

        monkeypatch.setattr(house.engine, "generate", noting)
        await monitor_of(house, clock, "~acme/sql").look()
        assert {request.priority for request in asked} == {INT32}
        assert len({request.cache_salt for request in asked}) == len(asked) == 5, "answer, its score, a completion's"
        assert all(request.lora is not None for request in asked)
    rows = read_usage(house.folder / "usage")
    assert {(row.tenant, row.key) for row in rows} == {("", "quality")}


async def test_the_operator_alone_sees_runs_and_accepts(house: House, clock: Clock) -> None:
    async with house.open():
        monitor = monitor_of(house, clock, "base")
        transport = httpx.ASGITransport(build_api(lambda: house.front, QualityApi(monitor).routes()))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:

            async def ask(caller: str, method: str, path: str) -> httpx.Response:
                headers = {"authorization": f"Bearer {house.keys[caller]}"}
                body = {} if method == "POST" else None
                return await http.request(method, f"/v1/quality{path}", headers=headers, json=body)

            assert (await ask("operator", "GET", "")).json() == {"object": "list", "data": []}
            ran = (await ask("operator", "POST", "/base/run")).json()
            assert (ran["id"], ran["measures"]["agreement"], ran["error"]) == ("base", 1.0, "")
            clock.now_s += 1
            accepted = (await ask("operator", "POST", "/base/accept")).json()
            assert accepted["baseline_at_s"] == clock.now_s > ran["baseline_at_s"]
            assert (await ask("operator", "GET", "")).json()["data"] == [accepted]
            async with AsyncAdminClient("http://localhost", house.keys["operator"], transport=transport) as client:
                assert (await client.run_quality("base")).measures == (await client.quality()).data[0].measures
                again = await client.accept_quality("base")
                assert again.measures is not None and again.measures.agreement == 1.0
            unknown = await ask("operator", "POST", "/nobody/run")
            assert unknown.status_code == 404 and "'base'" in unknown.text
            for method, path in (("GET", ""), ("POST", "/base/run"), ("POST", "/base/accept")):
                assert (await ask("acme", method, path)).status_code == 403
                assert (await ask("public", method, path)).status_code == 403
