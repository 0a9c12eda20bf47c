"""Opens the console's views in a real browser. They show traffic, and hostile texts as plain text. All of their names
and colors can be read, the page fits a phone, and each view has an address of its own.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.cluster.console.chromium import CHROMIUM, FAINT, UNNAMED, Open, act, ask, expect, push, show_adapter
from tests.cluster.harness import ADMIN_KEY, SharedServer

HOSTILE = "<img src=x onerror=alert(1)>\"'&`${1}"

pytestmark = [
    pytest.mark.xdist_group("shared_server"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
]


def hostile_history(history: dict[str, Any] | None) -> dict[str, Any] | None:
    if history is None:
        return None
    busy = {"name": HOSTILE, "requests": 7, "tokens": 70, "series": [0] * 119 + [7]}
    return history | {"busiest": [busy], "requests": [0] * 119 + [7]}


def hostile(page: Any) -> None:
    """Puts HTML that would do harm into each text of the server's answers."""

    def answer(route: Any) -> None:
        response = route.fetch(url=re.sub(r"(?<=[?&])replica=[^&]*&?", "", route.request.url))
        state = response.json()
        adapter = state["adapters"][0] | {"name": HOSTILE, "tenant": HOSTILE, "aliases": {HOSTILE: {"1": 1}}}
        replicas = [one | {"replica": HOSTILE} for one in state["replicas"][:1]]
        digest = "f" * 64
        replicas[0]["slots"] = [digest]
        failure = {"at_s": 1.0, "replica": HOSTILE, "adapter": HOSTILE, "tenant": None, "code": HOSTILE}
        route.fulfill(
            json=state
            | {"adapters": [adapter], "replicas": replicas, "names": {digest: HOSTILE}, "base_models": [HOSTILE]}
            | {"failures": [failure | {"message": HOSTILE, "count": 2}]}
            | {"loads": [{"replica": HOSTILE, "adapter": HOSTILE, "digest": digest, "kind": HOSTILE, "since_s": 1.0}]}
            | {"history": hostile_history(state["history"])}
        )

    def one(route: Any) -> None:
        version = {"number": 1, "digest": "f" * 64, "homes": [HOSTILE], "tiers": {HOSTILE: "gpu"}, "rank": 1}
        version |= {"num_bytes": 1, "created_s": 1.0, "source": HOSTILE, "metadata": {HOSTILE: HOSTILE}}
        route.fulfill(
            json={"name": HOSTILE, "tenant": HOSTILE, "pinned_replicas": 0, "removing": False, "found": False}
            | {"versions": [version], "aliases": {HOSTILE: {"1": 1}}}
            | {"history": {HOSTILE: [{"at_s": 1.0, "split": {"1": 1}}]}}
            | {"traffic": {"requests": 0, "failed": 0, "tokens": 0, "p95_first_token_s": None, "accepted_drafts": None}}
        )

    page.route("**/v1/console/state*", answer)
    page.route("**/v1/console/adapters/**", one)


def test_hostile_names_and_messages_are_text_wherever_they_stand(open_page: Open) -> None:
    page = open_page("fleet", key=ADMIN_KEY, prepare=hostile)
    for place in ("#loads", "#errors", "#base", "#fleet-traffic .busiest", "#fleet-traffic .values >> nth=2"):
        expect(page.locator(place)).to_contain_text(HOSTILE)
    page.locator(".replica h4 a").click()
    expect(page.locator("#replica-title")).to_have_text(f"Replica {HOSTILE}")
    expect(page.locator("#replica-traffic .busiest")).to_contain_text(HOSTILE)
    page.get_by_role("link", name="Adapters").click()
    expect(page.locator("#rows .name .link")).to_have_text(HOSTILE)
    page.locator("#rows .name .link").click()
    expect(page.locator("#detail-title")).to_have_text(HOSTILE)
    expect(page.locator("#detail .source").last).to_contain_text(HOSTILE)
    page.locator("#detail").get_by_role("button", name="Move", exact=True).click()
    expect(page.locator("#form-title")).to_have_text(f"Move {HOSTILE}")
    assert page.locator("img, script:not([src]), iframe").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_has_a_name_and_can_be_read(open_page: Open, scheme: str) -> None:
    page = open_page("fleet", color_scheme=scheme, key=ADMIN_KEY)
    replica = page.locator(".replica h4 a").first.get_attribute("href")
    page.wait_for_selector("#fleet-traffic .plot")
    for view in ("fleet", "adapters", "playground", replica, "#/nothing"):
        page.evaluate(f"location.hash = '{view}'")
        assert page.evaluate(UNNAMED) == []
        assert page.evaluate(FAINT) == []
    show_adapter(page, "ref0")
    assert page.evaluate(UNNAMED) == []
    assert page.evaluate(FAINT) == []
    act(page, "pin")
    assert page.evaluate(UNNAMED) == []
    assert page.evaluate(FAINT) == []


@pytest.mark.parametrize("view", ["fleet", "adapters", "playground", "/replicas/none"])
def test_a_phone_scrolls_down_only(open_page: Open, view: str) -> None:
    page = open_page(view, viewport={"width": 360, "height": 740})
    expect(page.locator("#base")).to_have_text("base")
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_polling_moves_nothing_and_pause_stops_it(open_page: Open, shared_server: SharedServer) -> None:
    page = open_page("adapters")
    expect(page.locator("#rows tr")).not_to_have_count(0)
    page.evaluate(
        """() => {
          window.shifts = [];
          new PerformanceObserver((list) => window.shifts.push(...list.getEntries().map((one) => one.value)))
            .observe({ type: "layout-shift" });
        }"""
    )
    for _ in range(2):
        ask(shared_server, "ref1")
        with page.expect_response(lambda response: "/v1/console/state" in response.url):
            pass
    assert sum(page.evaluate("window.shifts")) < 0.02
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#live-text")).to_have_text("Paused")
    with page.expect_response(lambda response: "/v1/console/state" in response.url):
        page.get_by_role("button", name="Pause").click()
    expect(page.locator("#live-text")).to_have_text("Live")


def test_charts_and_the_busiest_adapters_follow_the_traffic(
    open_page: Open, shared_server: SharedServer, tiny_model: Path
) -> None:
    for number, (name, times) in enumerate((("console-calm", 20), ("console-busy", 30))):
        push(shared_server, name, tiny_model.parent / f"a{number}")
        for _ in range(times):
            assert ask(shared_server, name) == 200
    page = open_page()
    traffic = page.locator("#fleet-traffic")
    rows = traffic.locator(".busiest tbody tr")
    for name, requests in (("console-calm", "20"), ("console-busy", "30")):
        expect(rows.filter(has_text=name).locator("td").first).to_have_text(requests)
    for plot in ("Tokens, tokens/s", "Time to first token", "Requests by adapter", "Adapter loads"):
        figure = traffic.locator("figure", has=page.get_by_role("slider", name=plot))
        expect(figure.locator("path[d^=M]").first).to_be_attached()
    counts = [int(one.replace(",", "")) for one in rows.locator("td:nth-child(2)").all_inner_texts()]
    assert counts == sorted(counts, reverse=True)
    expect(rows.first.locator("td").nth(1)).to_contain_text("%")
    rows.get_by_role("link", name="console-busy").click()
    expect(page.get_by_role("dialog", name="console-busy")).to_be_visible()
    for name in ("console-calm", "console-busy"):
        shared_server.http.delete(f"/v1/adapters/{name}").raise_for_status()


def test_a_chart_is_read_by_pointer_and_by_keyboard(open_page: Open, shared_server: SharedServer) -> None:
    assert ask(shared_server, "ref0") == 200
    page = open_page()
    plot = page.locator("#fleet-traffic").get_by_role("slider", name="Tokens")
    figure = page.locator("#fleet-traffic figure").first
    expect(figure.locator("path[d^=M]").first).to_be_attached()
    expect(figure.locator(".at")).to_have_text("last 5 s")
    plot.hover()
    expect(figure.locator(".at")).to_contain_text(":")
    page.mouse.move(0, 0)
    expect(figure.locator(".at")).to_have_text("last 5 s")
    plot.focus()
    page.keyboard.press("Home")
    expect(plot).to_have_attribute("aria-valuenow", "0")
    expect(plot).to_have_attribute("aria-valuetext", re.compile(r".*: generated \S+, prompts \S+"))
    page.keyboard.press("ArrowRight")
    expect(plot).not_to_have_attribute("aria-valuenow", "0")


def test_a_page_without_traffic_says_so(open_page: Open) -> None:
    def idle(page: Any) -> None:
        def answer(route: Any) -> None:
            state = route.fetch().json()
            zeros: dict[str, Any] = {name: [0] * 120 for name in ("requests", "tokens", "prompt_tokens", "slot_loads")}
            base = {"name": "", "requests": 0, "tokens": 0, "series": [0] * 120}
            zeros |= {"memory_loads": [0] * 120, "busiest": [], "base": base}
            zeros |= {name: [None] * 120 for name in ("median_first_token_s", "p99_first_token_s")}
            route.fulfill(json=state | {"history": state["history"] | zeros})

        page.route("**/v1/console/state*", answer)

    page = open_page(prepare=idle)
    traffic = page.locator("#fleet-traffic")
    for words in (
        "No requests in the",
        "No request received a token",
        "No adapter was loaded",
        "No adapter was requested",
    ):
        expect(traffic).to_contain_text(words)
    assert traffic.locator("path").count() == 0


def test_an_address_leads_to_an_adapter_and_back_and_forward_follow(open_page: Open) -> None:
    page = open_page("/adapters/ref1")
    sheet = page.get_by_role("dialog", name="ref1")
    expect(sheet).to_contain_text("1 version")
    page.reload()
    expect(sheet).to_contain_text("1 version")
    page.keyboard.press("Escape")
    expect(page).to_have_url(re.compile("#/adapters$"))
    page.go_back()
    expect(sheet).to_contain_text("1 version")
    page.go_forward()
    expect(sheet).to_be_hidden()
    page.get_by_role("link", name="Fleet").click()
    page.get_by_role("link", name="Playground").click()
    expect(page.locator("#view-playground")).to_be_visible()
    page.go_back()
    expect(page.locator("#view-fleet")).to_be_visible()
    expect(page.get_by_role("link", name="Fleet")).to_have_attribute("aria-current", "page")


def test_a_replica_has_an_address_with_its_own_slots_and_traffic(open_page: Open, shared_server: SharedServer) -> None:
    assert ask(shared_server, "ref0") == 200
    page = open_page()
    page.locator(".replica h4 a").first.click()
    expect(page).to_have_url(re.compile("#/replicas/"))
    expect(page.locator("#replica-picture .slot")).to_have_count(8)
    expect(page.locator("#replica-traffic figure")).to_have_count(4)
    page.reload()
    expect(page.locator("#replica-picture .slot")).to_have_count(8)
    page.go_back()
    expect(page.locator("#replicas .replica")).to_have_count(2)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("/adapters/nobody", "There is no adapter `nobody`"),
        ("/adapters/../state", "There is no adapter ../state"),
        ("/adapters/%2e%2e/state", "There is no adapter ../state"),
        (f"/adapters/{quote(HOSTILE)}", HOSTILE),
        ("/replicas/nobody", "There is no replica nobody now"),
        (f"/replicas/{quote(HOSTILE)}", f"There is no replica {HOSTILE} now"),
        ("/replicas/%", "There is no replica % now"),
        ("/nothing", "This view does not exist"),
        ("/constructor", "This view does not exist"),
    ],
)
def test_an_address_of_nothing_says_so(open_page: Open, address: str, words: str) -> None:
    page = open_page(address)
    expect(page.locator("body")).to_contain_text(words)
    assert page.locator("img, script:not([src]), iframe").count() == 0


def test_search_order_and_models_are_in_the_address(open_page: Open) -> None:
    page = open_page("/adapters?search=REF2&order=busiest")
    expect(page.get_by_role("searchbox")).to_have_value("REF2")
    expect(page.locator("#rows tr")).to_have_count(1)
    page.get_by_role("searchbox").fill("ref0")
    expect(page.locator("#rows")).to_contain_text("ref0")
    expect(page).to_have_url(re.compile(r"#/adapters\?search=ref0&order=busiest$"))
    page.get_by_role("link", name="ref0", exact=True).click()
    page.locator("#detail").get_by_role("button", name="Try it").click()
    expect(page).to_have_url(re.compile(r"#/playground\?model=base&model=ref0$"))
    expect(page.locator("#chips li")).to_have_count(2)
    expect(page.get_by_label("Prompt")).to_be_focused()
    page.get_by_role("button", name="Remove base").click()
    page.reload()
    expect(page.locator("#chips li")).to_have_text(["ref0×"])
    page.go_back()
    page.go_back()
    expect(page.get_by_role("searchbox")).to_have_value("ref0")
