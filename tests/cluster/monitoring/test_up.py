"""What `lorafleet metrics up` starts, and what it says where it cannot. test_live.py has it over a real server."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from file_server import FileServer
from lorafleet.cluster.monitoring import grafana, up
from lorafleet.cluster.monitoring.scrape_config import ScrapeTarget
from lorafleet.cluster.monitoring.up import Options
from lorafleet.protocol.errors import ConfigError
from tests.cluster.harness import free_port
from tests.cluster.monitoring.shipped import DASHBOARDS


@pytest.fixture
def server() -> Iterator[FileServer]:
    made = FileServer()
    made.files["/metrics"] = b"up 1\n"
    yield made
    made.close()


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that PATH begins with; no Prometheus or Grafana is on the rest of it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def install(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)


def options(server: FileServer, folder: Path, **changes: object) -> Options:
    given: dict[str, object] = {
        "target": ScrapeTarget(server.url),
        "folder": folder / "data",
        "port": free_port(),
        "grafana_port": free_port(),
        "grafana_home": None,
        "retention": "1d",
    }
    return Options(**given | changes)  # type: ignore[arg-type]  # of the fields' types


def test_without_prometheus_it_says_how_to_get_it(server: FileServer, programs: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"apt install prometheus.*lorafleet metrics config"):
        up.run(options(server, tmp_path))
    assert os.listdir(programs) == []


def test_a_server_that_does_not_answer_is_told_before_anything_starts(
    server: FileServer, programs: Path, tmp_path: Path
) -> None:
    install(programs, "prometheus", "exit 7")
    nobody = ScrapeTarget(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ConfigError, match=r"does not answer.*--server"):
        up.run(options(server, tmp_path, target=nobody))
    server.answers["/metrics"] = 404, b"not here"
    with pytest.raises(ConfigError, match=r"answers with status 404\. Check that this is the address"):
        up.run(options(server, tmp_path))
    assert not (tmp_path / "data").exists()


def test_a_server_that_asks_for_a_key_is_given_the_files(server: FileServer, programs: Path, tmp_path: Path) -> None:
    install(programs, "prometheus", "echo it ends here; exit 7")
    server.answers["/metrics"] = 401, b"no key"
    with pytest.raises(ConfigError, match=r"answers with status 401.*--bearer-token-file"):
        up.run(options(server, tmp_path))
    server.answers.clear()
    token = tmp_path / "token"
    token.write_text("sk-metrics\n")
    with pytest.raises(ConfigError, match="it ends here"):
        up.run(options(server, tmp_path, target=ScrapeTarget(server.url, bearer_token_file=token)))
    assert server.requests[-1][1]["authorization"] == "Bearer sk-metrics"
    [job] = yaml.safe_load((tmp_path / "data" / "prometheus.yml").read_text())["scrape_configs"]
    assert job["authorization"] == {"type": "Bearer", "credentials_file": str(token)}
    assert "sk-metrics" not in (tmp_path / "data" / "prometheus.yml").read_text()


def test_a_port_that_is_taken_is_told(server: FileServer, programs: Path, tmp_path: Path) -> None:
    install(programs, "prometheus", "exit 7")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for option in ("port", "grafana_port"):
            with pytest.raises(ConfigError, match=rf"127.0.0.1:{port}: .*--{option.replace('_', '-')}"):
                up.run(options(server, tmp_path, **{option: port}))


def test_an_address_that_prometheus_could_not_use_is_refused(tmp_path: Path) -> None:
    for url, told in (("127.0.0.1:8000", "such as http://"), ("http://host:1/v1", "without '/v1'"), ("ftp://a", "ftp")):
        with pytest.raises(ConfigError, match=told):
            ScrapeTarget(url)
    with pytest.raises(ConfigError, match="there is no file"):
        ScrapeTarget(bearer_token_file=tmp_path / "nowhere")
    assert ScrapeTarget("https://fleet.example").address == "fleet.example:443"
    assert ScrapeTarget("http://10.0.0.1:81/").metrics_url == "http://10.0.0.1:81/metrics"


def test_grafana_gets_prometheus_and_the_dashboards_and_listens_on_loopback(
    server: FileServer, programs: Path, tmp_path: Path
) -> None:
    asked = options(server, tmp_path)
    stale = tmp_path / "data" / "grafana" / "dashboards" / "lorafleet.json"
    stale.parent.mkdir(parents=True)
    stale.write_text("{}")
    up.write_files(asked)
    folder = asked.folder / "grafana"
    [source] = yaml.safe_load((folder / "provisioning/datasources/lorafleet.yml").read_text())["datasources"]
    assert source["url"] == f"http://127.0.0.1:{asked.port}"
    [provider] = yaml.safe_load((folder / "provisioning/dashboards/lorafleet.yml").read_text())["providers"]
    found = {json.loads(path.read_text())["uid"] for path in Path(provider["options"]["path"]).iterdir()}
    assert found == {one.uid for one in DASHBOARDS}
    settings = grafana.settings(folder, asked.grafana_port)
    assert (settings["GF_SERVER_HTTP_ADDR"], settings["GF_SERVER_HTTP_PORT"]) == ("127.0.0.1", str(asked.grafana_port))
    assert settings["GF_PATHS_PROVISIONING"] == str(folder / "provisioning")
    assert grafana.find_installed(tmp_path) is None
    install(programs, "grafana", "exit 0")
    installed = grafana.find_installed(tmp_path)
    assert installed is not None
    assert installed.command() == [str(programs / "grafana"), "server", "--homepath", str(tmp_path)]
    install(programs, "grafana-server", "exit 0")
    installed = grafana.find_installed(tmp_path)
    assert installed is not None
    assert installed.command() == [str(programs / "grafana-server"), "--homepath", str(tmp_path)]
