"""The charts in the documentation show the recorded figures."""

from __future__ import annotations

import runpy
from pathlib import Path

CHARTS = Path(__file__).parents[2] / "docs" / "charts"


def test_the_chart_is_drawn_from_its_figures() -> None:
    draw = runpy.run_path(str(CHARTS / "step_time.py"))["draw"]
    assert (CHARTS / "step_time.svg").read_text() == draw(), "run python docs/charts/step_time.py"
