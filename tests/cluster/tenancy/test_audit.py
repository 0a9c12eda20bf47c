"""The audit log has who did what and what came of it, and no secret; a tenant's metrics have nothing of others'."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from lorafleet.workers.openai.tenant_metrics import of_tenant
from tests.cluster.tenancy.house import House


async def test_every_administrator_s_call_is_logged_with_its_outcome_and_without_secrets(
    house: House, fleet: Callable[[str], Any]
) -> None:
    async with house.open():
        folder = fleet("llama3").adapters["qv"]
        calls = [
            (await house.push("acme", "sql", folder), "acme", {"name": "sql", "source": "upload"}),
            (await house.ask("acme", "POST", "/v1/adapters/sql/alias", {"version": 1, "alias": "b"}), "acme", None),
            (await house.ask("rival", "DELETE", "/v1/adapters/sql"), "rival", {}),
            (await house.ask("public", "DELETE", "/v1/adapters/sql"), "", {}),
            (await house.ask(None, "DELETE", "/v1/adapters/sql"), "", {}),
            (await house.ask("operator", "POST", "/v1/adapters/~acme/sql/pin", {"replicas": 9}), "admin-key", {}),
            (
                await house.ask("acme", "POST", "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/etc"}),
                "acme",
                0,
            ),
        ]
        await house.ask("acme", "GET", "/v1/adapters")
        await house.complete("acme", "sql")
        [path] = (house.folder / "audit").iterdir()
        text = path.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["status"] for line in lines] == [call[0].status_code for call in calls]
    assert [line["status"] for line in lines] == [200, 200, 404, 403, 401, 400, 403]
    assert [line.get("key", "") for line in lines] == [call[1] for call in calls]
    assert [line["action"].split("?")[0] for line in lines] == [
        f"{call[0].request.method} {call[0].request.url.path}" for call in calls
    ]
    assert lines[0]["what"]["name"] == "sql" and lines[1]["what"] == {"alias": "b", "version": "1"}
    assert lines[2]["error"] == "model_not_found" and lines[2]["tenant"] == "rival"
    assert lines[-1]["what"] == {"name": "x", "source": "/etc"}
    assert all(line["peer"] == "127.0.0.1" and line["at_s"] > 1.7e9 for line in lines)
    assert not any(key in text for key in house.keys.values())


EXPOSITION = b"""\
# HELP a_total Of models.
# TYPE a_total counter
a_total{model_name="~acme/sql",replica="r"} 1.0
a_total{model_name="~rival/sql",replica="r"} 2.0
a_total{model_name="sql",replica="r"} 3.0
a_total{model_name="~acme/sql+sql",replica="r"} 4.0
a_total{model_name="~acme/sql+~rival/sql",replica="r"} 5.0
# HELP b Of all.
# TYPE b gauge
b{replica="r"} 6.0
# HELP c Of tenants.
# TYPE c gauge
c{replica="r",tenant="acme"} 7.0
c{tenant="acme-2"} 8.0
c{tenant=""} 9.0
"""


def test_a_tenant_sees_its_own_series_only() -> None:
    assert of_tenant(EXPOSITION, "acme").decode().splitlines() == [
        "# HELP a_total Of models.",
        "# TYPE a_total counter",
        'a_total{model_name="sql",replica="r"} 1.0',
        'a_total{model_name="sql+sql",replica="r"} 4.0',
        "# HELP c Of tenants.",
        "# TYPE c gauge",
        'c{replica="r",tenant="acme"} 7.0',
    ]
    assert of_tenant(EXPOSITION, "nobody") == b""
