"""Copies the Prometheus rules and Grafana dashboards that ship with lorafleet. Their files, in shipped/, are their only
source: edit the rules by hand, and a dashboard in Grafana, whose JSON model then replaces its file.

docs/metrics.md and docs/alerts.md explain the rules. The dashboards query the series directly, so they work without
them.
"""

from __future__ import annotations

import shutil
from pathlib import Path

RULES_FILE = "lorafleet.rules.yml"
SHIPPED = Path(__file__).with_name("shipped")


def write_rules(folder: Path) -> Path:
    return Path(shutil.copyfile(SHIPPED / RULES_FILE, folder / RULES_FILE))


def write_dashboards(folder: Path) -> list[Path]:
    """Writes one file for each dashboard, named by its uid, and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    return [Path(shutil.copyfile(path, folder / path.name)) for path in sorted((SHIPPED / "grafana").iterdir())]
