from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.harness import SharedServer


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from tests.cluster.console.chromium import running_browser  # The import skips the test without Playwright.

    with running_browser() as made:
        yield made


@pytest.fixture
def open_page(browser: Any, shared_server: SharedServer) -> Iterator[Any]:
    """Opens views of the console of the server that tests share."""
    from tests.cluster.console.chromium import opening

    with opening(browser, shared_server.running.url) as open_view:
        yield open_view
