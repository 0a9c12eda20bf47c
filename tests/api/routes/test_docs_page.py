"""/docs in a real browser: Swagger UI shows the server's document, and nothing comes from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest


@pytest.fixture
def page(base_url: str) -> Iterator[Any]:
    from tests.cluster.console.chromium import CHROMIUM, PATIENCE_MS, running_browser

    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine")
    with running_browser() as browser:
        page = browser.new_page()
        page.set_default_timeout(PATIENCE_MS)
        asked: list[str] = []
        troubles: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
        page.goto(f"{base_url}/docs")
        yield page
        elsewhere = [url for url in asked if not url.startswith((f"{base_url}/", "data:"))]
        assert (elsewhere, troubles) == ([], [])


def test_swagger_ui_shows_the_document_and_sends_a_request(page: Any) -> None:
    from tests.cluster.console.chromium import expect

    chat = page.locator("#operations-default-post_v1_chat_completions")
    expect(chat).to_contain_text("/v1/chat/completions")
    expect(page.locator(".info .title")).to_contain_text("lorafleet")
    version = page.locator(".opblock", has=page.locator("[data-path='/version']"))
    version.locator(".opblock-summary-control").click()
    version.get_by_role("button", name="Try it out").click()
    version.get_by_role("button", name="Execute").click()
    expect(version.locator(".live-responses-table .response-col_status").last).to_contain_text("200")


def test_the_page_asks_for_a_key(page: Any) -> None:
    page.get_by_role("button", name="Authorize").click()
    assert page.locator(".auth-container input").is_visible()


async def test_the_files_may_load_nothing_from_elsewhere_and_other_names_are_404(http: httpx.AsyncClient) -> None:
    answer = await http.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    names = re.findall(r"(?:src|href)=\"docs/([^\"]+)\"", answer.text)
    assert sorted(names) == ["start.js", "swagger-ui-bundle.js", "swagger-ui.css"]
    for name in names:
        file = await http.get(f"/docs/{name}")
        policy = dict(part.split(" ", 1) for part in file.headers["content-security-policy"].split("; "))
        assert (policy["default-src"], policy["script-src"], policy["connect-src"]) == ("'none'", "'self'", "'self'")
        again = await http.get(f"/docs/{name}", headers={"if-none-match": file.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    for name in ("nothing.js", "redoc.standalone.js", "..%2fdocs.py", "%2e%2e/docs.py"):
        assert (await http.get(f"/docs/{name}")).status_code == 404, name
