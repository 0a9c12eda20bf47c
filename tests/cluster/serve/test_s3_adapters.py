"""Adapters that lie in S3 only, asked for over HTTP of a running cluster."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import openai
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from lorafleet.protocol.adapter_formats.adapter_files import folder_digest
from lorafleet.resolvers.cache import AdapterCache
from s3_server import BUCKET, KEY, SECRET, RadosGateway
from tests.cluster.harness import running_server

pytestmark = pytest.mark.xdist_group("own_server")


def metrics_of(url: str) -> dict[tuple[str, str], float]:
    """By name and outcome."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    return {(one.name, one.labels.get("outcome", "")): one.value for family in families for one in family.samples}


def hits_of(url: str, adapter: str) -> dict[str, float]:
    """By tier."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    samples = [one for family in families for one in family.samples if one.name == "lorafleet_adapter_hits_total"]
    return {one.labels["tier"]: one.value for one in samples if one.labels["model_name"] == adapter}


def test_an_adapter_that_only_lies_in_s3_is_served(
    gateway: RadosGateway, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = tiny_model.parent
    gateway.put_folder(local / "a0", "fleet/tiny/deep")
    gateway.put_folder(local / "a1", "fleet/named")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    s3 = {"uri": f"s3://{BUCKET}/fleet/{{base_model_name}}/{{lora_name}}", "endpoint_url": gateway.endpoint}
    arguments = ["--model", str(tiny_model), "--served-model-name", "tiny", "--kv-cache-tokens", "2048"]
    arguments += ["--lora-modules", f"local0={local / 'a0'}", f"named=s3://{BUCKET}/fleet/named"]
    arguments += ["--lora-resolver-s3", json.dumps(s3 | {"region": "us-east-1"})]
    arguments += ["--lora-cache-dir", str(tmp_path / "cache"), "--max-loras", "1", "--max-cpu-loras", "1"]
    with (
        running_server(arguments, tmp_path / "serve.log") as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):

        def ask(model: str) -> str:
            answer = client.completions.create(model=model, prompt="hello", max_tokens=8, temperature=0)
            return answer.choices[0].text

        expected = ask("local0")
        assert ask("deep") == expected
        assert expected not in (ask("tiny"), ask("named"))
        with pytest.raises(openai.NotFoundError):
            ask("absent")
        found = metrics_of(url)
        assert hits_of(url, "deep") == {"remote": 1}
        assert found["lorafleet_adapter_fetches_total", "fetched"] == 1
        assert found["lorafleet_adapter_cache_adapters", ""] == 2
        assert found["lorafleet_engine_lora_fetches_total", ""] == 1
        gateway.kill()
        try:
            assert ask("named") != expected  # takes the only slot and the only place in memory
            assert ask("deep") == expected  # from the disk of the node
            assert hits_of(url, "deep") == {"remote": 1, "disk": 1}
            with pytest.raises(openai.InternalServerError, match="cannot be reached") as raised:
                ask("another")
            assert raised.value.status_code == 503
        finally:
            gateway.restart()
        gateway.put_folder(local / "a0", "fleet/tiny/another")
        assert ask("another") == expected
        assert ask("named") != expected
        AdapterCache(tmp_path / "cache", 1 << 30).remove(folder_digest(local / "a0"))
        assert ask("deep") == expected  # fetched by the worker itself, as the name is known
        assert hits_of(url, "deep") == {"remote": 2, "disk": 1}
