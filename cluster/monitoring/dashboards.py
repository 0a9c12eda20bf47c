"""Collects the dashboards that ship with lorafleet. `lorafleet metrics dashboards DIR` writes them, and
configs/grafana/ has its output. They query the series directly, so they work without the recording rules."""

from __future__ import annotations

import json
from pathlib import Path

from lorafleet.cluster.monitoring.adapters_board import ADAPTERS
from lorafleet.cluster.monitoring.cluster_board import CLUSTER
from lorafleet.cluster.monitoring.overview_board import OVERVIEW
from lorafleet.cluster.monitoring.replica_board import REPLICA

DASHBOARDS = (OVERVIEW, ADAPTERS, REPLICA, CLUSTER)


def write(folder: Path) -> list[Path]:
    """Writes one file for each dashboard, named by its uid, and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for dashboard in DASHBOARDS:
        path = folder / f"{dashboard.uid}.json"
        path.write_text(json.dumps(dashboard.to_json(), indent=2, ensure_ascii=False) + "\n")
        written.append(path)
    return written
