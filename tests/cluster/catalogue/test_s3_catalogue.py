"""A cluster whose catalogue is in S3: pushed from there, over HTTP and by the command line, beside another writer, with
credentials that expire, removed without a trace, and served by a second cluster."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from lorafleet.cluster.catalogue.catalogue import Catalogue
from lorafleet.cluster.catalogue.catalogue_records import AdapterRecord, VersionRecord
from lorafleet.cluster.catalogue.s3_store import S3Store
from lorafleet.cluster.cli.cli import app
from s3_server import BUCKET, KEY, SECRET, RadosGateway, write_credentials
from tests.cluster.harness import running_server

pytestmark = pytest.mark.xdist_group("own_server")
ADMIN_KEY = "the admin key"
CATALOGUE = f"s3://{BUCKET}/catalogue"
PROMPT = [40, 41, 42, 43, 44, 45]


@dataclass(frozen=True, slots=True)
class Fleet:
    http: httpx.Client
    credentials: Path
    cache: Path

    def ask(self, model: str) -> list[int]:
        body = {"model": model, "prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        response = self.http.post("/v1/completions", json=body | {"return_token_ids": True})
        assert response.status_code == 200, response.text
        tokens: list[int] = response.json()["choices"][0]["token_ids"]
        return tokens

    def push(self, name: str, source: str, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/adapters", json={"name": name, "source": source, **fields})

    def held(self) -> dict[str, float]:
        """Adapters of all replicas, by tier."""
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        samples = [one for family in families for one in family.samples]
        names = {"lorafleet_engine_lora_slots_used": "gpu", "lorafleet_engine_lora_cpu_adapters": "cpu"}
        return {
            tier: sum(one.value for one in samples if one.name == name and one.labels["replica"])
            for name, tier in names.items()
        }


@pytest.fixture(scope="module")
def bucket(gateway: RadosGateway, tiny_model: Path) -> RadosGateway:
    for i in range(2):
        gateway.put_folder(tiny_model.parent / f"a{i}", f"sources/a{i}")
    return gateway


@pytest.fixture(scope="module")
def fleet(bucket: RadosGateway, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two replicas; ref0 and ref1 say what the adapters answer."""
    folder = tmp_path_factory.mktemp("fleet")
    credentials, cache = folder / "credentials", folder / "cache"
    write_credentials(credentials, KEY, SECRET)
    modules = [f"ref{i}={tiny_model.parent / f'a{i}'}" for i in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        for name in [one for one in os.environ if one.startswith("AWS_")]:
            patch.delenv(name)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
        patch.setenv("AWS_ENDPOINT_URL_S3", bucket.endpoint)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        arguments = ["--model", str(tiny_model), "--served-model-name", "base", "--num-replicas", "2"]
        arguments += ["--kv-cache-tokens", "8192", "--max-loras", "8", "--admin-key", ADMIN_KEY]
        arguments += ["--catalog-uri", CATALOGUE, "--lora-cache-dir", str(cache), "--lora-modules", *modules]
        with (
            running_server(arguments, folder / "serve.log") as url,
            httpx.Client(base_url=url, timeout=120, headers={"authorization": f"Bearer {ADMIN_KEY}"}) as client,
        ):
            yield Fleet(client, credentials, cache)


def test_s3_uris_are_pushed_by_command_line_and_http_and_kept_when_their_source_goes(
    fleet: Fleet, bucket: RadosGateway
) -> None:
    arguments = ["adapters", "push", "sql", f"s3://{BUCKET}/sources/a0", "--replicas", "2"]
    done = CliRunner().invoke(app, [*arguments, "--url", str(fleet.http.base_url), "--admin-key", ADMIN_KEY])
    assert done.exit_code == 0, done.output
    assert fleet.ask("sql") == fleet.ask("ref0") != fleet.ask("ref1")
    pushed = fleet.push("sql", f"s3://{BUCKET}/sources/a1", replicas=2)
    assert pushed.status_code == 200, pushed.text
    assert [one["source"] for one in pushed.json()["versions"]] == [f"s3://{BUCKET}/sources/a{i}" for i in range(2)]
    assert fleet.ask("sql") == fleet.ask("ref1")
    for one in bucket.client.list_objects_v2(Bucket=BUCKET, Prefix="sources/a1/")["Contents"]:
        bucket.client.delete_object(Bucket=BUCKET, Key=one["Key"])
    verified = fleet.http.post("/v1/adapters/sql/verify", json={})
    assert verified.json() == {"id": "sql", "verified": [1, 2]}, verified.text
    missing = fleet.push("other", f"s3://{BUCKET}/sources/a1")
    assert missing.status_code == 404, missing.text


def test_two_writers_lose_no_update_of_each_other(fleet: Fleet, bucket: RadosGateway) -> None:
    """The other one writes to the same catalogue, as another cluster's directory would."""
    assert fleet.push("shared", f"s3://{BUCKET}/sources/a0").status_code == 200
    other = Catalogue(S3Store(CATALOGUE, lambda: bucket.client))

    def entry(i: int) -> AdapterRecord:
        return AdapterRecord(f"outside{i}", (VersionRecord(1, f"{i:064x}", "elsewhere", 8, 1, 0.0),))

    async def write() -> None:
        for i in range(20):
            await other.change(f"outside{i}", lambda present, i=i: present or entry(i))

    writer = threading.Thread(target=lambda: asyncio.run(write()))
    writer.start()
    for i in range(20):
        moved = fleet.http.post("/v1/adapters/shared/alias", json={"version": 1, "alias": f"shared-{i}"})
        assert moved.status_code == 200, moved.text
    writer.join()
    reader = Catalogue(S3Store(CATALOGUE, lambda: bucket.client))
    asyncio.run(reader.load())
    there = reader.state.adapters
    assert {f"outside{i}" for i in range(20)} <= there.keys()
    assert {f"shared-{i}" for i in range(20)} <= there["shared"].aliases.keys()
    assert fleet.http.get("/v1/adapters/outside7").status_code in (200, 404)  # read when this cluster writes next
    assert fleet.http.post("/v1/adapters/shared/alias", json={"version": 1, "alias": "last"}).status_code == 200
    assert fleet.http.get("/v1/adapters/outside7").status_code == 200


def test_a_session_that_expires_stops_writes_with_a_503_and_nothing_else(fleet: Fleet, bucket: RadosGateway) -> None:
    assert fleet.push("steady", f"s3://{BUCKET}/sources/a0").status_code == 200
    expected = fleet.ask("steady")
    write_credentials(fleet.credentials, *bucket.session(1))
    bucket.suspend_user()  # so that the keys of before are refused, and these are read
    try:
        time.sleep(2)
        for _ in range(2):
            refused = fleet.http.post("/v1/adapters/steady/alias", json={"version": 1, "alias": "steady-next"})
            assert refused.status_code == 503, refused.text
            assert "refuses this cluster's credentials" in refused.json()["error"]["message"]
            assert refused.json()["error"]["code"] == "store_error"
        assert fleet.push("never", f"s3://{BUCKET}/sources/a0").status_code == 503
        assert fleet.ask("steady") == expected
        assert fleet.http.get("/v1/adapters/steady").json()["aliases"].keys() == {"steady"}
    finally:
        bucket.enable_user()
    write_credentials(fleet.credentials, KEY, SECRET)
    moved = fleet.http.post("/v1/adapters/steady/alias", json={"version": 1, "alias": "steady-next"})
    assert moved.status_code == 200, moved.text
    assert fleet.ask("steady-next") == expected


def test_what_is_removed_is_gone_from_slots_memory_disk_and_bucket_once_its_last_request_has_ended(
    fleet: Fleet, bucket: RadosGateway, tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "leaving"  # bytes of its own
    shutil.copytree(tiny_model.parent / "a1", folder)
    with (folder / "adapter_config.json").open("a") as config:
        config.write("\n")
    bucket.put_folder(folder, "sources/leaving")
    before = fleet.held()
    pushed = fleet.push("leaving", f"s3://{BUCKET}/sources/leaving", replicas=2)
    assert pushed.status_code == 200, pushed.text
    digest = pushed.json()["versions"][0]["digest"]

    def stored() -> list[str]:
        found = bucket.client.list_objects_v2(Bucket=BUCKET, Prefix=f"catalogue/adapters/{digest}/")
        return [one["Key"] for one in found.get("Contents", ())]

    assert fleet.http.post("/v1/adapters/leaving/pin", json={"replicas": 2}).status_code == 200
    body = {"model": "leaving", "prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "stream": True}
    with fleet.http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert fleet.held() == {"gpu": before["gpu"] + 2, "cpu": before["cpu"] + 2}
        assert (fleet.cache / "adapters" / digest).is_dir() and len(stored()) == 2
        waiting = fleet.http.delete("/v1/adapters/leaving", params={"wait_s": "0.2"})
        assert waiting.status_code == 503, waiting.text
        assert "requests for it are still running" in waiting.json()["error"]["message"]
        assert fleet.http.post("/v1/completions", json=body).status_code == 404
        assert len(stored()) == 2, "its files stay while a request may need them"
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    deadline = time.monotonic() + 120
    while fleet.http.get("/v1/adapters/leaving").status_code != 404:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert stored() == []
    assert not (fleet.cache / "adapters" / digest).exists()
    while fleet.held() != before:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_second_cluster_serves_the_same_catalogue_and_without_a_key_lets_nobody_change_it(
    fleet: Fleet, tiny_model: Path, tmp_path: Path
) -> None:
    assert fleet.push("common", f"s3://{BUCKET}/sources/a0").status_code == 200
    expected = fleet.ask("common")
    arguments = ["--model", str(tiny_model), "--served-model-name", "base", "--kv-cache-tokens", "4096"]
    arguments += ["--catalog-uri", CATALOGUE, "--lora-cache-dir", str(tmp_path / "cache")]
    with (
        running_server(arguments, tmp_path / "serve.log") as url,
        httpx.Client(base_url=url, timeout=120) as http,
    ):
        assert Fleet(http, fleet.credentials, fleet.cache).ask("common") == expected
        for headers in ({}, {"authorization": f"Bearer {ADMIN_KEY}"}):
            for method, path in (("GET", ""), ("POST", ""), ("DELETE", "/common")):
                refused = http.request(method, f"/v1/adapters{path}", headers=headers)
                assert refused.status_code == 403, refused.text
                assert refused.json()["error"]["type"] == "permission_error"
                assert "started without an admin key" in refused.json()["error"]["message"]
    assert fleet.ask("common") == expected
