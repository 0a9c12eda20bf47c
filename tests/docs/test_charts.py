"""The charts in the documentation show the recorded figures."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

CHARTS = Path(__file__).parents[2] / "docs" / "charts"
MEASURED = (CHARTS.parent / "measured.md").read_text()
SCRIPT = runpy.run_path(str(CHARTS / "draw.py"))

each = pytest.mark.parametrize("chart", SCRIPT["CHARTS"], ids=lambda chart: chart.name)


def figures(chart: object) -> list[float]:
    panels = SCRIPT["read_rows"](chart).values()
    return [value for groups in panels for bars in groups.values() for value in bars.values()]


@each
def test_a_chart_is_drawn_from_its_figures(chart: object) -> None:
    name = chart.name  # type: ignore[attr-defined]  # The script is no module.
    assert (CHARTS / f"{name}.svg").read_text() == SCRIPT["draw"](chart), "run python docs/charts/draw.py"
    assert f"charts/{name}.svg" in MEASURED


@each
def test_its_figures_are_in_the_tables(chart: object) -> None:
    figures = [
        value for groups in SCRIPT["read_rows"](chart).values() for one in groups.values() for value in one.values()
    ]
    assert figures
    assert [value for value in figures if f"{value:.2f}" not in MEASURED and f"{value:g}" not in MEASURED] == []


@each
def test_no_bar_is_higher_than_its_axis(chart: object) -> None:
    assert max(figures(chart)) < chart.top  # type: ignore[attr-defined]  # As above.
