"""The page of models lists the architectures that the decoder serves, and the recorded drift of quantized bases."""

from __future__ import annotations

import runpy
from pathlib import Path

SITE = Path(__file__).parents[2] / "docs" / "site"


def test_the_tables_are_those_of_the_descriptions_and_of_the_recorded_figures() -> None:
    program = runpy.run_path(str(SITE / "models_table.py"))
    page = program["PAGE"].read_text()
    assert "`Olmo2ForCausalLM`" in page and "NVFP4 | " in page
    assert program["with_tables"](page) == page, "run python docs/site/models_table.py"
