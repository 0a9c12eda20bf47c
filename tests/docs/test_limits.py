"""docs/limits.md is what the code enforces."""

from __future__ import annotations

import limits_page


def test_the_page_of_limits_is_the_one_that_is_written_from_the_code() -> None:
    assert limits_page.PAGE.read_text() == limits_page.write(), "run python tests/support/limits_page.py"
