"""Writes the tables of docs/models.md: architectures from the families' descriptions, and drift from recorded figures.

Run `python docs/site/models_table.py` after a family was added, or after benchmarks/quantization_drift.py was run.
tests/docs/test_models_page.py checks that it was done.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from lorafleet.workers.bases.families.architectures import FAMILIES

PAGE = Path(__file__).parents[1] / "models.md"
DRIFT = Path(__file__).parents[1] / "charts" / "results" / "quantization_drift.json"


def architectures() -> str:
    rows = (f"| `{family.architecture}` | {family.models} | {family.features} |\n" for family in FAMILIES.values())
    return "\n| architecture | models | features |\n|---|---|---|\n" + "".join(rows) + "\n"


def drift() -> str:
    results = json.loads(DRIFT.read_text())
    rows = []
    for case in results["cases"]:
        figures = case["figures"]
        label = case["settings"]["format"]
        cells = [
            f"`{label}`" if label.startswith("--") else label,
            f"{figures['perplexity']:.2f}",
            f"{1000 * figures['kl']:.3f}",
            f"{100 * figures['top1_agreement']:.1f} %",
            f"{1000 * figures['answer_kl']:.4f}",
            f"{100 * figures['answer_top1_agreement']:.1f} %",
            f"{figures['bytes_per_number']:.3f}",
        ]
        rows.append(f"| {' | '.join(cells)} |\n")
    heads = "format | perplexity | KL, 1e-3 nats | same top token | KL in answers | same in answers | bytes per number"
    head = f"| {heads} |\n|{'---|' * (heads.count('|') + 1)}\n"
    return f"\nCommand: `{results['command']}`, {results['date']}.\n\n{head}{''.join(rows)}\n"


TABLES: dict[str, Callable[[], str]] = {"architectures": architectures, "drift": drift}


def with_tables(page: str) -> str:
    """Returns the page with each table between its two comments."""
    for name, table in TABLES.items():
        between = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->\n)", re.DOTALL)
        page, count = between.subn(lambda found, table=table: found[1] + table() + found[2], page)
        assert count == 1, f"{PAGE} has {count} places for the table {name}"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
