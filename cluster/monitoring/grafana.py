"""Provisions Grafana with Prometheus as its data source, and with the dashboards. up.py starts it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from lorafleet.cluster.monitoring.shipped_files import write_dashboards

HOMES = (Path("/usr/share/grafana"), Path("/opt/grafana"))  # Folders where packages install its web pages.


@dataclass(frozen=True, slots=True)
class Installed:
    """A Grafana that is installed."""

    program: str
    home: Path  # Folder of its web pages and defaults.

    def command(self) -> list[str]:
        first = [self.program] if self.program.endswith("grafana-server") else [self.program, "server"]
        return [*first, "--homepath", str(self.home)]


def find_installed(home: Path | None = None) -> Installed | None:
    program = shutil.which("grafana-server") or shutil.which("grafana")
    found = home or next((folder for folder in HOMES if (folder / "conf" / "defaults.ini").is_file()), None)
    return None if program is None or found is None else Installed(program, found)


def provision(folder: Path, prometheus_url: str) -> None:
    """Writes folder/dashboards and folder/provisioning for a Grafana that reads this Prometheus."""
    shutil.rmtree(folder / "dashboards", ignore_errors=True)  # A dashboard that no longer exists must not stay.
    write_dashboards(folder / "dashboards")
    source = {"name": "lorafleet", "type": "prometheus", "access": "proxy", "url": prometheus_url, "isDefault": True}
    _write(folder / "provisioning" / "datasources" / "lorafleet.yml", {"apiVersion": 1, "datasources": [source]})
    provider = {
        "name": "lorafleet",
        "folder": "lorafleet",
        "type": "file",
        "allowUiUpdates": False,
        "options": {"path": str((folder / "dashboards").absolute())},
    }
    _write(folder / "provisioning" / "dashboards" / "lorafleet.yml", {"apiVersion": 1, "providers": [provider]})


def settings(folder: Path, port: int) -> Mapping[str, str]:
    """Returns the environment variables for Grafana. It listens on the loopback interface, keeps its own login, and
    sends no reports home."""
    return {
        "GF_SERVER_HTTP_ADDR": "127.0.0.1",
        "GF_SERVER_HTTP_PORT": str(port),
        "GF_PATHS_DATA": str(folder / "data"),
        "GF_PATHS_LOGS": str(folder / "logs"),
        "GF_PATHS_PLUGINS": str(folder / "plugins"),
        "GF_PATHS_PROVISIONING": str((folder / "provisioning").absolute()),
        "GF_ANALYTICS_REPORTING_ENABLED": "false",
        "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
        "GF_ANALYTICS_CHECK_FOR_PLUGIN_UPDATES": "false",
    }


def _write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content, sort_keys=False))
