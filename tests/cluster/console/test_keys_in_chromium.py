"""The console in a real browser where the server has keys: without one, with a tenant's, with the operator's, and with
one that is revoked while the page is open. Of its two tenants, "acme" and "rival", nothing of the second may come
to the first."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

import real_server
from lorafleet.cluster.tenancy.key_file import HASH_PREFIX
from lorafleet.cluster.tenancy.key_text import digest_of, make_key
from lorafleet.protocol.errors import AdapterMissing
from real_server import ADMIN_KEY, RealServer
from tests.cluster.console.chromium import (
    CHROMIUM,
    FAINT,
    UNNAMED,
    Open,
    act,
    choose_folder,
    enter_key,
    expect,
    opening,
    show_adapter,
    submit,
    wait_until_closed,
)

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
]

DEMO = Path(__file__).parents[3] / "demo"
PIRATE = DEMO / "adapters" / "pirate"
KEYS: dict[str, tuple[str, list[str]]] = {
    "acme-app": ("acme", ["infer"]),
    "acme-ops": ("acme", ["infer", "admin"]),
    "acme-meter": ("acme", ["metrics"]),
    "rival-ops": ("rival", ["infer", "admin"]),
}
OF_RIVAL = ("rival", "law-secret")


@dataclass
class Served:
    """keys: by their ids. file: what is in force."""

    server: RealServer
    file: Path
    keys: dict[str, str] = field(default_factory=lambda: {name: make_key() for name in KEYS})

    def admit(self, *ids: str) -> None:
        """These keys, and no others."""
        entries = [
            {"id": one, "hash": HASH_PREFIX + digest_of(self.keys[one]), "tenant": KEYS[one][0], "scopes": KEYS[one][1]}
            for one in ids
        ]
        self.file.write_text(json.dumps({"keys": entries, "tenants": {"rival": {"sources": [str(DEMO)]}}}))

    def ask(self, key: str, path: str, body: dict[str, Any]) -> None:
        headers = {"authorization": f"Bearer {self.keys[key]}"}
        httpx.post(f"{self.server.url}{path}", json=body, headers=headers, timeout=120).raise_for_status()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`shout` is public. The rival has an adapter of its own, in a slot, and an error."""
    folder = tmp_path_factory.mktemp("console-keys")
    made = Served(RealServer(), folder / "keys.json")
    made.admit(*KEYS)
    adapters = {"shout": DEMO / "adapters" / "shout"}
    with real_server.running(
        folder, DEMO / "model", adapters, {}, api_keys=made.file, kv_cache_tokens=4096
    ) as made.server:
        made.ask("rival-ops", "/v1/adapters", {"name": "law-secret", "source": str(DEMO / "adapters" / "json")})
        made.ask("rival-ops", "/v1/completions", {"model": "law-secret", "prompt": "hello", "max_tokens": 4})
        assert made.server.front is not None
        failures = made.server.front.telemetry.failures
        failures.record(AdapterMissing("no files of ~rival/law-secret"), "~rival/law-secret", "rival")
        yield made


@pytest.fixture
def open_page(browser: Any, served: Served) -> Iterator[Open]:
    with opening(browser, served.server.url) as open_view:
        yield open_view


@pytest.fixture
def open_as_acme(open_page: Open, served: Served) -> Iterator[Open]:
    """With a key of acme's. What has come to the page until the end of the test has nothing of the rival's in it."""
    asked: list[Any] = []

    def listen(page: Any) -> None:
        page.on("requestfinished", lambda request: "/v1/" in request.url and asked.append(request))

    def open_view(view: str, key: str) -> Any:
        return open_page(view, key=served.keys[key], prepare=listen)

    yield open_view
    answers = [response.text() for request in list(asked) if (response := request.response()).status != 304]
    assert answers
    for answer in answers:
        assert not any(word in answer for word in OF_RIVAL), answer


def test_without_a_key_the_page_asks_for_one_and_the_keyboard_gives_it(open_page: Open, served: Served) -> None:
    page = open_page("adapters", state="lost")
    locked = page.get_by_role("region", name="This server requires a key")
    expect(locked).to_contain_text("The console shows what your API key may see")
    for view in ("Fleet", "Playground", "Adapters"):
        page.get_by_role("link", name=view).click()
        expect(locked).to_be_visible()
        assert page.locator("main > section:visible").count() == 1
    page.reload()
    expect(page.get_by_role("button", name="Enter a key")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.type(served.keys["acme-app"])
    page.keyboard.press("Enter")
    expect(page.locator("#rows")).to_contain_text("shout")
    expect(locked).to_be_hidden()
    expect(page.locator("#main")).to_be_focused()
    expect(page.locator("#key-text")).to_have_text("Key of acme")


def test_an_address_waits_for_the_key_and_is_left_when_the_key_is_revoked(open_page: Open, served: Served) -> None:
    page = open_page("/adapters/law-secret", state="lost")
    enter_key(page, "Key", served.keys["rival-ops"])
    expect(page.get_by_role("dialog", name="law-secret")).to_contain_text("1 version")
    served.admit(*(one for one in KEYS if one != "rival-ops"))
    try:
        expect(page.locator("#locked")).to_be_visible()
        assert "law-secret" not in page.url
    finally:
        served.admit(*KEYS)


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 360)])
def test_a_key_that_opens_nothing_is_answered_with_why(
    open_page: Open, served: Served, scheme: str, width: int
) -> None:
    page = open_page(state="lost", color_scheme=scheme, viewport={"width": width, "height": 740})
    assert page.evaluate(UNNAMED) == [] and page.evaluate(FAINT) == []
    locked = page.locator("#locked")
    enter_key(page, "Key", "no such key")
    expect(locked).to_contain_text("this server has no such key, or it was revoked")
    enter_key(page, "Key rejected", served.keys["acme-meter"])
    expect(locked).to_contain_text("'acme-meter' has the scopes metrics; this request needs the scope infer")
    expect(page.locator("#trouble")).to_be_hidden()
    assert page.evaluate(UNNAMED) == [] and page.evaluate(FAINT) == []
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_a_tenants_key_to_infer_shows_its_own_and_what_is_public_and_changes_nothing(
    open_as_acme: Open,
) -> None:
    page = open_as_acme("fleet", "acme-app")
    expect(page.locator(".replica .facts")).to_contain_text("shown of 4 slots")
    expect(page.locator("#errors")).to_contain_text("No errors since")
    expect(page.locator("#loads")).to_contain_text("Nothing is being loaded")
    expect(page.locator("#fleet-traffic figure:visible")).to_have_count(3)  # Loads are not its own.
    expect(page.locator(".slot[aria-label$='empty, or not yours']").first).to_be_visible()
    page.get_by_role("link", name="Adapters").click()
    expect(page.locator("#rows tr")).to_have_count(1)
    expect(page.get_by_role("button", name="Push adapter")).to_be_disabled()
    expect(page.locator("#push-reason")).to_contain_text(
        "'acme-app' has the scopes infer; this request needs the scope admin"
    )
    for hidden in ("law", "~rival", "secret"):
        page.get_by_role("searchbox").fill(hidden)
        expect(page.locator("#no-rows")).to_be_visible()
    page.get_by_role("link", name="Playground").click()
    page.get_by_label("Prompt").fill("What colour is a lime?")
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_role("article", name="shout").locator("pre")).to_have_text("A LIME IS GREEN.")


def test_a_tenants_admin_key_administers_its_own_and_pins_nothing(open_as_acme: Open, served: Served) -> None:
    page = open_as_acme("adapters", "acme-ops")
    expect(page.locator("#key-text")).to_have_text("Admin key of acme")
    page.get_by_role("button", name="Push adapter").click()
    expect(page.get_by_label("Tenant")).to_have_count(0)
    page.get_by_label("Name", exact=True).fill("sql")
    page.get_by_label("Folder on this machine").set_input_files(PIRATE)
    submit(page)
    served.ask("acme-app", "/v1/completions", {"model": "sql", "prompt": "hello", "max_tokens": 2})
    show_adapter(page, "sql")
    expect(page.locator("#detail .tagline")).to_contain_text("tenant acme")
    expect(page.locator("#detail [data-act=pin]")).to_be_disabled()
    expect(page.locator("#closed")).to_contain_text("it needs the operator's key")
    act(page, "alias").get_by_label("Alias", exact=True).fill("sql-next")
    page.get_by_label("Version 1").fill("1")
    submit(page)
    expect(page.locator("#detail [data-act=alias]")).to_be_focused()
    act(page, "push").get_by_label("Or a path or URI").fill(str(PIRATE))
    page.locator("#form-submit").click()
    expect(page.locator("#form-trouble")).to_contain_text("may not let the server read")
    page.keyboard.press("Escape")
    act(page, "remove").get_by_label("Type sql to confirm").fill("sql")
    submit(page)
    page.get_by_role("searchbox").fill("")
    expect(page.locator("#rows tr")).to_have_count(1)
    show_adapter(page, "shout")
    expect(page.locator("#closed")).to_contain_text("It is public: only the operator can change it.")


def test_the_operator_sees_all_tenants_and_pushes_for_one(open_page: Open, served: Served) -> None:
    served.ask("rival-ops", "/v1/completions", {"model": "law-secret", "prompt": "hello", "max_tokens": 2})
    page = open_page("fleet", key=ADMIN_KEY)
    expect(page.locator("#errors")).to_contain_text("~rival/law-secret")
    expect(page.get_by_role("button", name="~rival/law-secret,").first).to_be_visible()
    page.get_by_role("link", name="Adapters").click()
    choose_folder(page, "given", PIRATE)
    page.get_by_label("Tenant").fill("acme")
    page.get_by_label("Number of replicas to pin it to").fill("1")
    submit(page)
    served.ask("acme-app", "/v1/completions", {"model": "given", "prompt": "hello", "max_tokens": 2})
    show_adapter(page, "~acme/given")
    expect(page.locator("#detail .tagline")).to_contain_text("pinned to 1 replica")
    act(page, "unpin")
    submit(page)
    act(page, "remove").get_by_label("Type ~acme/given to confirm").fill("~acme/given")
    submit(page)


def test_a_key_that_is_revoked_takes_away_what_it_showed(open_page: Open, served: Served) -> None:
    page = open_page("adapters", key=served.keys["rival-ops"])
    show_adapter(page, "law-secret")
    served.admit(*(one for one in KEYS if one != "rival-ops"))
    try:
        expect(page.get_by_role("region", name="This key does not open the console")).to_contain_text("was revoked")
        assert not any(word in page.locator("body").inner_text() for word in OF_RIVAL)
        page.get_by_role("button", name="Enter a key").press("Enter")
        page.keyboard.type(served.keys["acme-app"])
        page.keyboard.press("Enter")
        wait_until_closed(page)
        page.get_by_role("searchbox").fill("")
        expect(page.locator("#rows")).to_contain_text("shout")
        expect(page.locator("#chips")).not_to_contain_text("law-secret")
    finally:
        served.admit(*KEYS)
