"""Prometheus takes the rules that ship, and each alert does what its name says."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lorafleet.cluster.monitoring import scrape_config
from tests.cluster.monitoring.shipped import alerts, record_names

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "configs" / "prometheus"
CASES = FOLDER / "lorafleet.rules.test.yml"

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def promtool(*arguments: str) -> str:
    done = subprocess.run(["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_configuration_that_ships_is_what_the_code_writes() -> None:
    remedy = "write it again: lorafleet metrics config configs/prometheus"
    assert (FOLDER / "prometheus.yml").read_text() == scrape_config.to_yaml(scrape_config.ScrapeTarget()), remedy


@needs_promtool
def test_prometheus_takes_the_configuration_and_its_rules() -> None:
    assert f"{len(record_names()) + len(alerts())} rules found" in promtool("check", "config", "prometheus.yml")


@needs_promtool
def test_each_alert_fires_a_little_beyond_its_bound_and_is_silent_a_little_within() -> None:
    assert "SUCCESS" in promtool("test", "rules", CASES.name)


def test_every_alert_has_a_case_and_a_section_that_says_what_to_do() -> None:
    assert re.findall(r'alertname="(\w+)"', CASES.read_text()) == list(alerts())
    assert re.findall(r"^## (\w+)$", (ROOT / "docs" / "alerts.md").read_text(), re.M) == list(alerts())
    for name, alert in alerts().items():
        assert alert["annotations"]["runbook"] == f"docs/alerts.md#{name.lower()}"
        assert alert["annotations"]["summary"] and alert["annotations"]["action"]


def test_every_recorded_series_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert [name for name in record_names() if f"| `{name}` | " not in text] == []
