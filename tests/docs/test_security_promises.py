"""SECURITY.md names the test that holds each promise: they are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "SECURITY.md").read_text())


def test_promises_name_tests() -> None:
    assert len(NAMED) > 15


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_a_test_that_holds_a_promise_is_there(path: str, name: str) -> None:
    assert re.search(rf"^(async )?def {name or 'test_'}", (ROOT / path).read_text(), re.MULTILINE), (path, name)
