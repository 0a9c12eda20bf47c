"""A real browser on the console, and how its tests use the page.

Nothing of the page may come from or go to elsewhere, and no script may fail: opening() checks it at its end.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.cluster.harness import SharedServer

playwright = pytest.importorskip("playwright.sync_api", reason="the console's tests drive a browser with Playwright")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"]
PATIENCE_MS = 120_000

Open = Callable[..., Any]


@contextlib.contextmanager
def running_browser() -> Iterator[Any]:
    with playwright.sync_playwright() as engine:
        chromium = engine.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@contextlib.contextmanager
def opening(browser: Any, url: str) -> Iterator[Open]:
    """Opens views of the server's console, each in a browser profile of its own."""
    contexts: list[Any] = []
    troubles: list[str] = []
    origin = urlsplit(url).netloc

    def note_request(request: Any) -> None:
        if urlsplit(request.url).netloc != origin and not request.url.startswith("data:"):
            troubles.append(f"asked for {request.url}")

    def note_console(message: Any) -> None:
        # What a server refuses is a line of the browser's own.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            troubles.append(message.text)

    def open_view(
        view: str = "fleet", *, key: str | None = None, prepare: Any = None, state: str = "live", **options: Any
    ) -> Any:
        """state: of the page's calls, which is waited for."""
        context = browser.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        page.on("request", note_request)
        page.on("console", note_console)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("dialog", lambda dialog: troubles.append(f"a script asks {dialog.message}"))
        if key is not None:
            page.add_init_script(f"sessionStorage.setItem('lorafleet.key', {json.dumps(key)})")
        if prepare is not None:
            prepare(page)
        page.goto(f"{url}/console#{view}")
        page.wait_for_selector(f"#live[data-state={state}]")
        return page

    yield open_view
    for context in contexts:
        context.close()
    assert troubles == []


def expect(locator: Any) -> Any:
    playwright.expect.set_options(timeout=PATIENCE_MS)
    return playwright.expect(locator)


def act(page: Any, action: str) -> Any:
    """Presses a button of the sheet; answers the dialog that it opens."""
    page.locator(f"#detail [data-act='{action}']").click()
    return page.locator("#form")


def choose_folder(page: Any, name: str, folder: Path) -> None:
    """Opens the form for a push, and fills in a name and a folder."""
    page.get_by_role("button", name="Push adapter").click()
    page.get_by_label("Name", exact=True).fill(name)
    page.get_by_label("Folder on this machine").set_input_files(folder)


def submit(page: Any) -> str:
    """Sends the dialog's form and waits until it has closed; what is said then."""
    page.locator("#form-submit").click()
    wait_until_closed(page)
    return str(page.locator("#toasts p").last.inner_text())


def wait_until_closed(page: Any) -> None:
    """The dialog; before, nothing else has the focus, and what is typed is lost."""
    expect(page.locator("#form")).not_to_have_attribute("open", "")


def enter_key(page: Any, button: str, key: str) -> None:
    """button: by its name, which says what key there is."""
    page.get_by_role("button", name=button, exact=True).click()
    page.get_by_role("textbox", name="Key", exact=True).fill(key)
    page.locator("#form-submit").click()
    wait_until_closed(page)


def show_adapter(page: Any, name: str) -> None:
    page.get_by_role("link", name="Adapters").click()
    page.get_by_role("searchbox").fill(name)
    page.locator("#rows").get_by_role("link", name=name, exact=True).click()
    page.wait_for_selector("#detail .versions")


UNNAMED = """() => {
  const words = (one) => [
    one.getAttribute("aria-label"),
    ...(one.getAttribute("aria-labelledby") ?? "").split(" ").map((id) => document.getElementById(id)?.textContent),
    ...[...(one.labels ?? [])].map((label) => label.textContent),
    one.textContent,
  ];
  return [...document.querySelectorAll("button, a, input, select, textarea, [role=button], dialog[open], section")]
    .filter((one) => one.checkVisibility() && !words(one).some((said) => said?.trim()))
    .map((one) => one.outerHTML);
}"""
# WCAG's contrast of each text that is seen with what lies behind it, 4.5 or more; disabled controls need none.
FAINT = """() => {
  const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = color;
    context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data];
  };
  const linear = (one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const behind = (node) => {
    const slot = node.closest(".slot");
    if (slot) return rgba(getComputedStyle(slot.querySelector("rect")).fill);
    for (let at = node; at; at = at.parentElement) {
      const color = rgba(getComputedStyle(at).backgroundColor);
      if (color[3] === 255) return color;
    }
    return [255, 255, 255, 255];
  };
  const faint = [];
  const top = [...document.querySelectorAll("dialog[open]")].at(-1) ?? document.body;
  const walker = document.createTreeWalker(top, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !node.checkVisibility()) continue;
    if (node.closest(":disabled, title, option, .unseen")) continue;
    const style = getComputedStyle(node);
    const both = [light(rgba(node instanceof SVGElement ? style.fill : style.color)), light(behind(node))];
    const contrast = (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
    if (contrast < 4.5) faint.push(`${contrast.toFixed(2)} ${node.outerHTML.slice(0, 120)}`);
  }
  return faint;
}"""


def ask(server: SharedServer, model: str) -> int:
    body = {"model": model, "prompt": "hello", "max_tokens": 4}
    return server.http.post("/v1/completions", json=body).status_code


def shown(server: SharedServer, name: str) -> dict[str, Any]:
    response = server.http.get(f"/v1/adapters/{name}")
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def push(server: SharedServer, name: str, source: Path) -> None:
    response = server.http.post("/v1/adapters", json={"name": name, "source": str(source)})
    assert response.status_code == 200, response.text
