"""Draws the charts of the documentation as SVG: grouped bars in panels, each chart from the CSV file of its name.

    python docs/charts/draw.py

A CSV file has the columns panel, group, series and value. The figures are those of the tables in docs/measured.md,
which also name the commands and the hardware.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
WIDTH, HEIGHT = 860, 336
LEFT, RIGHT, TOP, PLOT_HEIGHT, GAP = 56, 20, 90, 190, 16  # Lengths in pixels.
MAX_BAR_WIDTH = 24  # Width in pixels.
TEXT, GRID = "#1f2937", "#e5e7eb"
OURS, PEER = "#0f766e", "#a8b3c2"
NUM_TICKS = 3


@dataclass(frozen=True, slots=True)
class Chart:
    name: str
    title: str
    axis: str  # Label of the groups of bars.
    top: float  # Upper end of the value axis.
    colors: dict[str, str]  # Colors by series, in the order of the bars.


CHARTS = (
    Chart(
        "step_time",
        "Milliseconds per decode step, 8B model on one H200: lower is better",
        "requests in the batch",
        45,
        {"lorafleet": OURS, "vLLM 0.26": PEER},
    ),
    Chart(
        "lora_kernels",
        "Milliseconds that adapters add to a step's linears, one H200: lower is better",
        "tokens x adapters",
        4.5,
        {"lorafleet": OURS, "best peer": PEER, "bytes alone": "#d9c27e"},
    ),
    Chart(
        "tensor_parallel",
        "Milliseconds per decode step, 8B model on one, two and four H200s: lower is better",
        "requests in the batch",
        18,
        {"1 GPU": "#99c9c4", "2 GPUs": "#4a9f97", "4 GPUs": OURS},
    ),
)
Rows = dict[str, dict[str, dict[str, float]]]  # Values by panel, group and series.


def read_rows(chart: Chart) -> Rows:
    rows: Rows = {}
    with (HERE / f"{chart.name}.csv").open() as file:
        for line in csv.DictReader(file):
            rows.setdefault(line["panel"], {}).setdefault(line["group"], {})[line["series"]] = float(line["value"])
    return rows


def text(x: float, y: float, content: str, size: int = 13, anchor: str = "middle", weight: str = "normal") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="{TEXT}">{content}</text>'
    )


def bar(x: float, width: float, value: float, chart: Chart, color: str) -> str:
    """Draws one bar with its value above it."""
    height = PLOT_HEIGHT * value / chart.top
    y = TOP + PLOT_HEIGHT - height
    label = text(x + width / 2, y - 4, f"{value:.1f}" if value >= 1 else f"{value:.2f}", 10)
    return f'<rect x="{x:g}" y="{y:.1f}" width="{width:g}" height="{height:.1f}" fill="{color}"/>{label}'


def panel(left: float, width: float, title: str, groups: dict[str, dict[str, float]], chart: Chart) -> str:
    """Draws the groups of bars of one panel, with grid lines behind them."""
    parts = [text(left + width / 2, TOP - 14, title, 14, weight="bold")]
    for tick in range(NUM_TICKS + 1):
        y = TOP + PLOT_HEIGHT - PLOT_HEIGHT * tick / NUM_TICKS
        parts.append(f'<line x1="{left:g}" x2="{left + width:g}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}"/>')
        if left == LEFT:
            parts.append(text(left - 8, y + 4, f"{chart.top * tick / NUM_TICKS:g}", 11, "end"))
    step = width / len(groups)
    bar_width = min(MAX_BAR_WIDTH, round(0.85 * step / len(chart.colors)))
    for index, (group, values) in enumerate(groups.items()):
        middle = left + step * (index + 0.5)
        first = middle - len(values) * (bar_width + 1) / 2
        for number, (series, color) in enumerate((name, hue) for name, hue in chart.colors.items() if name in values):
            parts.append(bar(first + number * (bar_width + 1), bar_width, values[series], chart, color))
        parts.append(text(middle, TOP + PLOT_HEIGHT + 17, group, 12))
    return "\n".join(parts)


def draw(chart: Chart) -> str:
    """Returns the whole chart as SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="white"/>',
        text(LEFT, 28, chart.title, 15, "start", "bold"),
    ]
    legend = WIDTH - RIGHT - 105 * len(chart.colors)
    for index, (series, color) in enumerate(chart.colors.items()):
        x = legend + 105 * index
        parts.append(f'<rect x="{x}" y="37" width="12" height="12" fill="{color}"/>')
        parts.append(text(x + 18, 48, series, 12, "start"))
    panels = read_rows(chart)
    width = (WIDTH - LEFT - RIGHT - GAP * (len(panels) - 1)) / len(panels)
    for index, (title, groups) in enumerate(panels.items()):
        parts.append(panel(LEFT + index * (width + GAP), width, title, groups, chart))
    parts.append(text(WIDTH / 2, HEIGHT - 14, chart.axis, 12))
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    for each in CHARTS:
        (HERE / f"{each.name}.svg").write_text(draw(each))
