"""A real Prometheus, as `lorafleet metrics up` starts it, over a server that is asked for everything: each query of
each dashboard and each recording rule returns data."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from tests.cluster.harness import SharedServer, free_port
from tests.cluster.monitoring.shipped import DASHBOARDS, GPU_RECORD, alerts, record_names

pytestmark = [
    pytest.mark.xdist_group("shared_server"),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed"),
]

PATIENCE_S = 120.0


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def answer(http: httpx.Client, model: str) -> int:
    body = {"model": model, "prompt": "hello, hello", "max_tokens": 6, "ignore_eos": True, "stream": True}
    return http.post("/v1/completions", json=body).status_code


def ask_for_everything(server: SharedServer) -> None:
    """Adapters of every tier and source, a name that nobody knows, one that is loaded and dropped again, and one that
    cannot be loaded. The one on the web server is new each time, since the nodes keep those that they have fetched."""
    http, source = server.http, server.resolver_dir / "cold"
    distant = f"distant-{uuid4().hex[:8]}"
    server.web.put(f"/{distant}", {path.name: path.read_bytes() for path in source.iterdir()})

    def loaded(name: str, path: str | Path) -> int:
        body = {"lora_name": name, "lora_path": str(path), "load_inplace": True}
        return http.post("/v1/load_lora_adapter", json=body).status_code

    # A replica that an earlier test has ended may still be on its way back.
    for model in ("base", "ref0", "ref1", "ref2", "cold", distant):
        until(lambda model=model: answer(http, model) == 200, f"{model} does not answer")
    assert answer(http, "no-adapter-has-this-name") == 404
    until(lambda: loaded("passing-through", source) == 200, "it cannot be loaded")
    until(lambda: answer(http, "passing-through") == 200, "it does not answer")
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "passing-through"}).status_code == 200
    assert loaded("damaged", "/nowhere") >= 400


class Prometheus:
    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=f"{url}/api/v1", timeout=60)

    def get(self, path: str, **parameters: str) -> Any:
        answer = self.http.get(path, params=parameters).json()
        assert answer["status"] == "success", (path, parameters, answer)
        return answer["data"]

    def values(self, query: str) -> list[float]:
        return [float(one["value"][1]) for one in self.get("query", query=query)["result"]]

    def has(self, query: str) -> bool:
        """Whether it returns a number; 0 / 0 is none."""
        return any(map(math.isfinite, self.values(query)))

    def wait_for_scrapes(self) -> None:
        """Two, and what the rules make of them."""
        seen = "count_over_time(lorafleet_scrape_complete[1h])"
        [before] = self.values(seen)
        until(lambda: self.values(seen)[0] >= before + 3, "no scrapes")


@contextlib.contextmanager
def metrics_up(server: str, folder: Path) -> Iterator[Prometheus]:
    port = free_port()
    command = [sys.executable, "-c", "from lorafleet.cluster.cli.cli import main; main()", "metrics", "up"]
    command += ["--server", server, "--port", str(port), "--grafana-port", str(free_port())]
    command += ["--data", str(folder / "data"), "--scrape-interval", "2"]
    with (folder / "up.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, process_group=0)
    url = f"http://127.0.0.1:{port}"

    def announced() -> bool:
        assert process.poll() is None, (folder / "up.log").read_text()
        return url in (folder / "up.log").read_text()

    try:
        until(announced, "lorafleet metrics up does not announce Prometheus")
        made = Prometheus(url)
        yield made
        made.http.close()
    finally:
        os.kill(process.pid, signal.SIGINT)
        status = process.wait(PATIENCE_S)
    assert status == 0, (folder / "up.log").read_text()
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


@pytest.fixture(scope="module")
def prometheus(shared_server: SharedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with metrics_up(shared_server.running.url, tmp_path_factory.mktemp("metrics")) as made:
        until(lambda: made.values("lorafleet_scrape_complete") == [1.0], "scrapes lack a replica")
        yield made


def test_there_is_one_target_and_it_is_well(prometheus: Prometheus, shared_server: SharedServer) -> None:
    [target] = prometheus.get("targets")["activeTargets"]
    assert target["scrapeUrl"] == f"{shared_server.running.url}/metrics"
    until(lambda: prometheus.values('up{job="lorafleet"}') == [1.0], "the target is not well")
    until(lambda: prometheus.values("count(vllm:num_requests_running)") == [2.0], "a replica is not shown")


def test_the_rules_are_evaluated_without_an_error(prometheus: Prometheus) -> None:
    found = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in found} == {*record_names(), *alerts()}
    until(
        lambda: all(rule["health"] == "ok" for group in prometheus.get("rules")["groups"] for rule in group["rules"]),
        "rules that fail or are never evaluated",
    )


def with_data(server: SharedServer, prometheus: Prometheus, queries: dict[str, str]) -> None:
    """Each returns a number, sooner or later: a rate needs two scrapes that saw its series."""
    missing = {name: query for name, query in queries.items() if not prometheus.has(query)}
    deadline = time.monotonic() + PATIENCE_S
    while missing and time.monotonic() < deadline:
        ask_for_everything(server)
        prometheus.wait_for_scrapes()
        missing = {name: query for name, query in missing.items() if not prometheus.has(query)}
    assert missing == {}, "these return no data"


def test_every_recording_rule_has_data(prometheus: Prometheus, shared_server: SharedServer) -> None:
    with_data(shared_server, prometheus, {name: name for name in record_names() if name != GPU_RECORD})
    assert prometheus.values(GPU_RECORD) == []


def test_every_query_of_every_dashboard_returns_data(prometheus: Prometheus, shared_server: SharedServer) -> None:
    names = {variable.name for one in DASHBOARDS for variable in one.variables}

    def filled(query: str) -> str:
        for name in names:
            query = query.replace(f"${name}", ".+")
        return query.replace("$__rate_interval", "10m")

    panels = [(one.uid, panel) for one in DASHBOARDS for panel in one.panels]
    with_data(
        shared_server,
        prometheus,
        {
            f"{uid}: {panel.title}: {query}": filled(query)
            for uid, panel in panels
            for query in panel.queries
            if not panel.is_empty_here
        },
    )
    for _, panel in panels:
        if panel.is_empty_here:
            assert [prometheus.values(filled(query)) for query in panel.queries] == [[]]


def test_every_variable_has_values(prometheus: Prometheus) -> None:
    for dashboard in DASHBOARDS:
        for variable in dashboard.variables:
            assert prometheus.get(f"label/{variable.label}/values", **{"match[]": variable.series}), variable
