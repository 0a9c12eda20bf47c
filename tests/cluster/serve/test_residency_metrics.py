"""The series from which the Gateway API inference extension and llm-d read which adapters a replica holds."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

from lorafleet.api.telemetry.http_metrics import Metrics
from lorafleet.api.telemetry.tenant_metrics import of_tenant
from lorafleet.cluster.serve import residency_metrics
from lorafleet.cluster.serve.residency_metrics import ResidencyMetrics
from lorafleet.protocol.messages import EngineStats, LoRALimits


async def rendered(names: list[tuple[str, str]], **stats: Any) -> str:
    engine: Any = SimpleNamespace(
        hello=SimpleNamespace(lora=LoRALimits(16, 3, 5, 8, "auto")), stats=EngineStats(**stats), adapter_names=names
    )
    metrics = Metrics(lambda: EngineStats(), "base", "r1")
    metrics.add(ResidencyMetrics(engine, "base", clock=lambda: 1234.5))
    return (await metrics.render()).decode()


def series(text: str, name: str) -> list[tuple[dict[str, str], float]]:
    return [
        (dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value))
        for labels, value in re.findall(rf"^{re.escape(name)}{{(.*)}} (\S+)$", text, re.M)
    ]


NAMES = [("sql", "d1"), ("sql-stable", "d1"), ("chat", "d2"), ("cold", "d3"), ("gone", "d9"), ("~acme/law", "d4")]


async def test_the_names_are_those_of_the_present_residents() -> None:
    text = await rendered(
        NAMES,
        resident_slots=["d1", "", "d4"],
        pinned_slots=[2],
        resident_cpu=["d1", "d2"],
        waiting_adapters=["d3", "d1", "d2"],
    )
    assert series(text, "vllm:lora_requests_info") == [
        (
            {
                "replica": "r1",
                "max_lora": "3",
                "running_lora_adapters": "sql,sql-stable,~acme/law",
                "waiting_lora_adapters": "chat,cold",
            },
            1234.5,
        )
    ]
    loaded = {(s["adapter_name"], s["level"], s["pinned"]): v for s, v in series(text, "vllm:lora_adapter_loaded")}
    assert loaded == {
        ("sql", "gpu", "false"): 1,
        ("sql-stable", "gpu", "false"): 1,
        ("~acme/law", "gpu", "true"): 1,
        ("chat", "cpu", "false"): 1,
    }
    assert series(text, "vllm:num_gpu_loaded_lora_adapters") == [({"replica": "r1", "model_name": "base"}, 2)]
    assert series(text, "vllm:num_cpu_loaded_lora_adapters") == [({"replica": "r1", "model_name": "base"}, 2)]
    assert series(text, "vllm:max_gpu_lora_adapters") == [({"replica": "r1", "model_name": "base"}, 5)]


async def test_a_name_of_a_new_version_is_not_where_the_old_one_is() -> None:
    text = await rendered([("sql", "new")], resident_slots=["old"], resident_cpu=["new"])
    assert [s["level"] for s, _ in series(text, "vllm:lora_adapter_loaded")] == ["cpu"]


async def test_the_number_of_series_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(residency_metrics, "MAX_SHOWN", 5)
    names = [(f"a{number}", f"d{number}") for number in range(40)]
    digests = [digest for _, digest in names]
    text = await rendered(names, resident_slots=digests[:3], resident_cpu=digests, waiting_adapters=digests)
    assert len(series(text, "vllm:lora_adapter_loaded")) == 3 + 5
    [(info, _)] = series(text, "vllm:lora_requests_info")
    assert len(info["waiting_lora_adapters"].split(",")) == 5
    [(_, count)] = series(text, "vllm:num_cpu_loaded_lora_adapters")
    assert count == 40


async def test_a_tenant_sees_only_its_own_adapters() -> None:
    text = await rendered(NAMES, resident_slots=["d1", "d4"], waiting_adapters=["d3"])
    shown = of_tenant(text.encode(), "acme").decode()
    assert [s["adapter_name"] for s, _ in series(shown, "vllm:lora_adapter_loaded")] == ["law"]
    assert "lora_requests_info" not in shown
    assert "sql" not in shown
