from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from tests.cluster.console.chromium import running_browser  # The import skips the test without Playwright.

    with running_browser() as made:
        yield made
