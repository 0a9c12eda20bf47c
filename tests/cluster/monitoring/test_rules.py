"""The rules that ship are what the code writes, Prometheus takes them, and each alert does what its name says."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lorafleet.cluster.monitoring import rules, scrape_config
from lorafleet.cluster.monitoring.rules import ALERTS, RECORDS, RULES_FILE

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "configs" / "prometheus"
CASES = FOLDER / "lorafleet.rules.test.yml"

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def promtool(*arguments: str) -> str:
    done = subprocess.run(["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_files_that_ship_are_what_the_code_writes() -> None:
    remedy = "write them again: lorafleet metrics config configs/prometheus"
    assert (FOLDER / RULES_FILE).read_text() == rules.to_yaml(), remedy
    assert (FOLDER / "prometheus.yml").read_text() == scrape_config.to_yaml(scrape_config.ScrapeTarget()), remedy


@needs_promtool
def test_prometheus_takes_the_configuration_and_its_rules() -> None:
    assert f"{len(RECORDS) + len(ALERTS)} rules found" in promtool("check", "config", "prometheus.yml")


@needs_promtool
def test_each_alert_fires_a_little_beyond_its_bound_and_is_silent_a_little_within() -> None:
    assert "SUCCESS" in promtool("test", "rules", CASES.name)


def test_every_alert_has_a_case_and_a_section_that_says_what_to_do() -> None:
    names = [alert.name for alert in ALERTS]
    assert re.findall(r'alertname="(\w+)"', CASES.read_text()) == names
    assert re.findall(r"^## (\w+)$", (ROOT / rules.RUNBOOK).read_text(), re.M) == names


def test_every_recorded_series_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    missing = [one.name for one in RECORDS if f"| `{one.name}` | {one.meaning}" not in text]
    assert missing == []
