"""Draws step_time.svg from step_time.csv: milliseconds of a decode step by batch size, lorafleet beside vLLM.

    python docs/charts/step_time.py

The figures are those of `python benchmarks/engine_e2e.py` in docs/measured.md, which names the hardware.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PANELS = {"0": "base model", "8": "8 adapters", "64": "64 adapters"}
WIDTH, HEIGHT = 860, 320
LEFT, TOP, PLOT_HEIGHT, PANEL_WIDTH, GAP = 56, 74, 190, 250, 16  # px
BAR_WIDTH = 24  # px
MAX_MS, TICK_MS = 45, 15
LORAFLEET, VLLM, TEXT, GRID = "#0f766e", "#a8b3c2", "#1f2937", "#e5e7eb"


@dataclass(frozen=True, slots=True)
class Row:
    batch: str
    lorafleet_ms: float
    vllm_ms: float


def read_rows() -> dict[str, list[Row]]:
    """Returns the rows of each panel, by the number of adapters."""
    rows: dict[str, list[Row]] = {adapters: [] for adapters in PANELS}
    with (HERE / "step_time.csv").open() as file:
        for one in csv.DictReader(file):
            rows[one["adapters"]].append(Row(one["batch"], float(one["lorafleet_ms"]), float(one["vllm_ms"])))
    return rows


def text(x: float, y: float, content: str, size: int = 13, anchor: str = "middle", weight: str = "normal") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="{TEXT}">{content}</text>'
    )


def bar(x: float, value_ms: float, color: str) -> str:
    """Draws one bar with its value above it."""
    height = PLOT_HEIGHT * value_ms / MAX_MS
    y = TOP + PLOT_HEIGHT - height
    label = text(x + BAR_WIDTH / 2, y - 4, f"{value_ms:.1f}", 10)
    return f'<rect x="{x:g}" y="{y:.1f}" width="{BAR_WIDTH}" height="{height:.1f}" fill="{color}"/>{label}'


def panel(left: float, title: str, rows: Sequence[Row]) -> str:
    """Draws one number of adapters: a pair of bars for each batch size."""
    parts = [text(left + PANEL_WIDTH / 2, TOP - 14, title, 14, weight="bold")]
    for tick in range(0, MAX_MS + 1, TICK_MS):
        y = TOP + PLOT_HEIGHT - PLOT_HEIGHT * tick / MAX_MS
        parts.append(f'<line x1="{left:g}" x2="{left + PANEL_WIDTH:g}" y1="{y:g}" y2="{y:g}" stroke="{GRID}"/>')
        if left == LEFT:
            parts.append(text(left - 8, y + 4, str(tick), 11, "end"))
    step = PANEL_WIDTH / len(rows)
    for index, row in enumerate(rows):
        middle = left + step * (index + 0.5)
        parts.append(bar(middle - BAR_WIDTH - 1, row.lorafleet_ms, LORAFLEET))
        parts.append(bar(middle + 1, row.vllm_ms, VLLM))
        parts.append(text(middle, TOP + PLOT_HEIGHT + 17, row.batch, 12))
    return "\n".join(parts)


def draw() -> str:
    """Returns the whole chart as SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="white"/>',
        text(LEFT, 28, "Milliseconds per decode step, 8B model on one H200: lower is better", 15, "start", "bold"),
        f'<rect x="{WIDTH - 200}" y="17" width="12" height="12" fill="{LORAFLEET}"/>',
        text(WIDTH - 182, 28, "lorafleet", 13, "start"),
        f'<rect x="{WIDTH - 100}" y="17" width="12" height="12" fill="{VLLM}"/>',
        text(WIDTH - 82, 28, "vLLM 0.26", 13, "start"),
    ]
    for index, (adapters, rows) in enumerate(read_rows().items()):
        parts.append(panel(LEFT + index * (PANEL_WIDTH + GAP), PANELS[adapters], rows))
    parts.append(text(WIDTH / 2, HEIGHT - 14, "requests in the batch", 12))
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    (HERE / "step_time.svg").write_text(draw())
