"""docs/metrics.md names every series that a cluster exports, as it is exported, and no other."""

from __future__ import annotations

from pathlib import Path

from exposition import Shown, shown

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def row_of(metric: Shown) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.text} |"


async def test_every_exported_series_is_in_the_reference_as_it_is_exported(tmp_path: Path) -> None:
    exported = [row_of(metric) for metric in await shown(tmp_path)]
    kinds = ("| counter |", "| gauge |", "| histogram |", "| summary |")
    written = [line for line in DOCS.read_text().splitlines() if any(kind in line for kind in kinds)]
    missing = [row for row in exported if row not in written]
    assert not missing, "docs/metrics.md lacks these rows:\n" + "\n".join(missing)
    assert sorted(written) == sorted(exported), f"not exported: {sorted(set(written) - set(exported))}"
