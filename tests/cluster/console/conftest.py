from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from tests.cluster.console.chromium import running_browser  # skips who imports it where Playwright is missing

    with running_browser() as made:
        yield made
