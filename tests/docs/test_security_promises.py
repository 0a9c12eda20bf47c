"""SECURITY.md names the test that holds each promise, and so do other pages that promise something: they are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("SECURITY.md", *(f"docs/{page}.md" for page in ("adapter-safety", "failures", "keys-and-tenants", "security")))


def named_in(page: str) -> list[tuple[str, str]]:
    return re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / page).read_text())


NAMED = sorted({named for page in PAGES for named in named_in(page)})


def test_promises_name_tests() -> None:
    assert len(named_in("SECURITY.md")) > 15


def test_each_promise_is_followed_by_its_tests() -> None:
    promises = (ROOT / "SECURITY.md").read_text().partition("\n## Promises\n")[2].partition("\n## ")[0]
    found = re.split(r"^- ", promises, flags=re.MULTILINE)[1:]
    assert [promise for promise in found if "\n    - `tests/" not in promise] == []


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_a_test_that_holds_a_promise_is_there(path: str, name: str) -> None:
    assert re.search(rf"^(async )?def {name or 'test_'}", (ROOT / path).read_text(), re.MULTILINE), (path, name)
