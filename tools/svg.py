"""Draws plots as inline SVG without scripts. The page (comparison_report.py) sets colors and fonts, so the plots fit
its light and dark themes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

WIDTH = 640
LEFT, RIGHT, TOP, BOTTOM = 150, 60, 12, 34  # Margins around a plot.
HEIGHT = 240  # Height of a plot with axes.
BAR = 18  # Height of one bar.
Series = Mapping[str, Sequence[tuple[float, float]]]


def bars(rows: Sequence[tuple[str, Sequence[tuple[str, float | None]]]], *, whole: float | None, unit: str) -> str:
    """Draws horizontal bars in groups.

    Args:
        rows: (group, [(what, value)]). A value of None has no bar.
        whole: The end of the scale. None means the largest value.
    """
    values = [value for _, group in rows for _, value in group if value is not None]
    end = whole or max(values, default=1.0) or 1.0
    parts, y = [], float(TOP)
    for label, group in rows:
        middle = y + BAR * len(group) / 2
        parts.append(f'<text class="label" x="{LEFT - 10}" y="{middle + 4:.1f}" text-anchor="end">{_cut(label)}</text>')
        for i, (what, value) in enumerate(group):
            if value is not None:
                length = (WIDTH - LEFT - RIGHT) * min(value / end, 1.0)
                shown = f"{escape(label)}, {escape(what)}: {number(value, unit)}"
                parts.append(
                    f'<rect class="s{i}" x="{LEFT}" y="{y + 1:.1f}" width="{length:.1f}" height="{BAR - 3}" rx="2">'
                    f"<title>{shown}</title></rect>"
                    f'<text class="value" x="{LEFT + length + 6:.1f}" y="{y + 13:.1f}">{number(value, unit)}</text>'
                )
            y += BAR
        y += 10
    return _svg(y + 4, parts)


def lines(series: Series, *, x_name: str, y_name: str) -> str:
    """Draws one line for each name, on linear axes that begin at zero."""

    def line(i: int, name: str, places: Sequence[tuple[float, float]]) -> str:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        return f'<polyline class="l{i % 8}" points="{path}"><title>{escape(name)}</title></polyline>'

    return _plot(series, x_name, y_name, line)


def dots(series: Series, *, x_name: str, y_name: str) -> str:
    """Draws one dot for each point, on the same axes as lines()."""

    def cloud(i: int, name: str, places: Sequence[tuple[float, float]]) -> str:
        title = f"<title>{escape(name)}</title>"
        return "".join(f'<circle class="d{i % 8}" cx="{x:.1f}" cy="{y:.1f}" r="4">{title}</circle>' for x, y in places)

    return _plot(series, x_name, y_name, cloud)


def _plot(
    series: Series, x_name: str, y_name: str, draw: Callable[[int, str, Sequence[tuple[float, float]]], str]
) -> str:
    """Draws axes and series. For each series, `draw` is called with its number, its name and its points in the
    drawing."""
    points = [point for some in series.values() for point in some]
    x_end = max((x for x, _ in points), default=1.0) or 1.0
    y_end = nice_end(max((y for _, y in points), default=1.0))
    parts = [*_axes(x_end, y_end, x_name, y_name)]
    for i, (name, some) in enumerate(series.items()):
        parts.append(draw(i, name, [(_x(x, x_end), _y(y, y_end)) for x, y in some]))
    return _svg(HEIGHT, parts)


def number(value: float, unit: str = "") -> str:
    if unit == "%":
        return f"{value:.1%}"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.3g}" if 1e-3 <= abs(value) < 1e5 else f"{value:.1e}"


def nice_end(largest: float) -> float:
    """Rounds up to the next of 1, 2, 5, 10, …, so that an axis ends at a round number."""
    if not largest > 0 or not math.isfinite(largest):
        return 1.0
    power: float = 10.0 ** math.floor(math.log10(largest))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= largest * 0.999999)


def _axes(x_end: float, y_end: float, x_name: str, y_name: str) -> list[str]:
    parts = []
    for i in range(5):
        y = y_end * i / 4
        line_y = _y(y, y_end)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{line_y:.1f}" y2="{line_y:.1f}"/>')
        parts.append(f'<text class="value" x="{LEFT - 8}" y="{line_y + 4:.1f}" text-anchor="end">{number(y)}</text>')
    parts += [
        f'<text class="value" x="{_x(x, x_end):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{x:g}</text>'
        for x in (0.0, x_end / 2, x_end)
    ]
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="label" x="{middle}" y="{HEIGHT - 3}" text-anchor="middle">{escape(x_name)}</text>')
    parts.append(f'<text class="label" x="8" y="{TOP + 10}">{escape(y_name)}</text>')
    return parts


def _x(value: float, end: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * value / end


def _y(value: float, end: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP - 10) * min(value / end, 1.0)


def _svg(height: float, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">{"".join(parts)}</svg>'


def _cut(text: str) -> str:
    return escape(text if len(text) <= 20 else f"{text[:19]}…")
