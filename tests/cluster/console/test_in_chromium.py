"""The console in a real browser against a real server: every action, by mouse and by keyboard, and what it must not do.
With tenants' keys: test_keys_in_chromium.py.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

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
)
from tests.cluster.harness import ADMIN_KEY, SharedServer

HOSTILE = "<img src=x onerror=alert(1)>\"'&`${1}"

pytestmark = [
    pytest.mark.xdist_group("shared_server"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
]


@pytest.fixture
def open_page(browser: Any, shared_server: SharedServer) -> Iterator[Open]:
    with opening(browser, shared_server.running.url) as open_view:
        yield open_view


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


def test_the_fleet_shows_what_is_in_slots_and_what_was_asked(open_page: Open, shared_server: SharedServer) -> None:
    assert ask(shared_server, "ref0") == 200
    page = open_page()
    expect(page.locator(".replica")).to_have_count(2)
    slot = page.get_by_role("button", name="ref0,").first
    expect(slot).to_be_visible()
    expect(page.locator("#tiles")).to_contain_text("p95 TTFT")
    slot.click()
    expect(page.get_by_role("dialog", name="ref0")).to_contain_text("in a slot")


def test_a_failure_of_serving_is_listed_with_its_cause(open_page: Open, shared_server: SharedServer) -> None:
    broken = shared_server.resolver_dir / "console-broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_text("{}")
    assert ask(shared_server, "console-broken") >= 400
    failure = open_page().locator("#errors li", has_text="console-broken")
    expect(failure).to_contain_text("Adapter")


def test_search_finds_an_adapter_and_its_sheet_gives_the_focus_back(open_page: Open) -> None:
    page = open_page("adapters")
    expect(page.locator("#rows tr")).not_to_have_count(0)
    page.get_by_role("searchbox").fill("REF1")
    expect(page.locator("#rows tr")).to_have_count(1)
    name = page.get_by_role("link", name="ref1", exact=True)
    name.click()
    expect(page.get_by_role("dialog", name="ref1")).to_contain_text("1 version")
    page.keyboard.press("Escape")
    expect(page.locator("#detail")).not_to_have_attribute("open", "")
    expect(name).to_be_focused()
    page.get_by_role("searchbox").fill("nobody is called so")
    expect(page.locator("#no-rows")).to_be_visible()


def test_without_the_key_administration_is_closed_and_says_why(open_page: Open) -> None:
    page = open_page("adapters")
    expect(page.get_by_role("button", name="Push adapter")).to_be_disabled()
    expect(page.locator("#push-reason")).to_have_text("Changing adapters needs the admin key.")
    enter_key(page, "Enter a key", "not the key")
    expect(page.locator("#push-reason")).to_contain_text("Incorrect admin key")
    enter_key(page, "Key in use", ADMIN_KEY)
    expect(page.get_by_role("button", name="Push adapter")).to_be_enabled()
    assert page.evaluate("sessionStorage.length + localStorage.length + document.cookie.length") == 0
    page.reload()
    expect(page.get_by_role("button", name="Push adapter")).to_be_disabled()


def test_an_administrator_pushes_a_folder_and_moves_rolls_back_and_removes_its_names(
    open_page: Open, shared_server: SharedServer, tiny_model: Path
) -> None:
    name = "console/tool"
    page = open_page("adapters", key=ADMIN_KEY)
    choose_folder(page, name, tiny_model.parent / "a0")
    submit(page)
    assert ask(shared_server, name) == 200
    show_adapter(page, name)
    dialog = act(page, "push")
    dialog.get_by_label("Or a path or URI").fill(str(tiny_model.parent / "a1"))
    assert "v2" in submit(page)
    first, second = (one["digest"] for one in shown(shared_server, name)["versions"])
    expect(page.locator("#detail .versions > li")).to_have_count(2)
    expect(page.locator("#detail")).to_contain_text(second)
    dialog = act(page, "alias")
    dialog.get_by_label("Alias", exact=True).fill("console/next")
    dialog.get_by_label("Version 1").fill("1")
    submit(page)
    assert shown(shared_server, name)["aliases"]["console/next"]["split"] == {"1": 1.0}
    dialog = act(page, f"move {name}")
    dialog.get_by_label("Version 1").fill("1")
    dialog.get_by_label("Version 2").fill("3")
    submit(page)
    assert shown(shared_server, name)["aliases"][name]["split"] == {"1": 1.0, "2": 3.0}
    expect(page.locator("#detail")).to_contain_text("v1 25\u00a0% · v2 75\u00a0%")
    act(page, f"rollback {name}")
    submit(page)
    assert shown(shared_server, name)["aliases"][name]["split"] == {"2": 1.0}
    act(page, "drop console/next")
    submit(page)
    assert list(shown(shared_server, name)["aliases"]) == [name]
    assert first != second
    dialog = act(page, "remove")
    dialog.get_by_label(f"Type {name} to confirm").fill("something else")
    page.locator("#form-submit").click()
    expect(page.locator("#form-trouble")).to_contain_text("The text is not")
    dialog.get_by_label(f"Type {name} to confirm").fill(name)
    submit(page)
    assert shared_server.http.get(f"/v1/adapters/{name}").status_code == 404
    expect(page.locator("#detail")).not_to_have_attribute("open", "")


def test_an_administrator_pins_unpins_prefetches_and_verifies(
    open_page: Open, shared_server: SharedServer, tiny_model: Path
) -> None:
    push(shared_server, "console-pins", tiny_model.parent / "a2")
    page = open_page("adapters", key=ADMIN_KEY)
    show_adapter(page, "console-pins")
    act(page, "pin").get_by_label("Replicas").fill("2")
    submit(page)
    assert shown(shared_server, "console-pins")["pinned_replicas"] == 2
    expect(page.locator("#detail .tagline")).to_contain_text("pinned to 2 replicas")
    act(page, "unpin")
    submit(page)
    assert shown(shared_server, "console-pins")["pinned_replicas"] == 0
    act(page, "prefetch").get_by_label("Replicas").fill("2")
    assert "2 replicas" in submit(page)
    act(page, "verify")
    assert "v1 has the bytes" in submit(page)
    act(page, "pin").get_by_label("Replicas").fill("99")
    page.locator("#form-submit").click()
    expect(page.locator("#form-trouble")).to_contain_text("this cluster has 2 now")
    page.keyboard.press("Escape")
    shared_server.http.delete("/v1/adapters/console-pins").raise_for_status()


def test_a_folder_that_is_no_adapter_is_refused_before_it_is_sent(open_page: Open, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    page = open_page("adapters", key=ADMIN_KEY)
    choose_folder(page, "console-none", tmp_path)
    page.locator("#form-submit").click()
    expect(page.locator("#form-trouble")).to_contain_text("adapter_config.json")


def test_the_draft_lora_of_a_folder_is_sent(open_page: Open, tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "drafted"
    shutil.copytree(tiny_model.parent / "a0", folder)
    (folder / "draft").mkdir()
    shutil.copy(folder / "adapter_config.json", folder / "draft")
    page = open_page("adapters", key=ADMIN_KEY)
    choose_folder(page, "console-drafted", folder)
    page.locator("#form-submit").click()
    expect(page.locator("#form-trouble")).to_contain_text("draft/adapter_model.safetensors is missing")


def test_the_playground_streams_one_prompt_to_several_models(open_page: Open, shared_server: SharedServer) -> None:
    page = open_page("playground")
    page.get_by_label("Prompt").fill("hello")
    page.get_by_label("Max tokens").fill("12")
    for name in ("ref2", "console-nobody"):
        page.get_by_label("Models side by side").fill(name)
        page.get_by_role("button", name="Add", exact=True).click()
    page.get_by_role("button", name="Run").click()
    for name in ("base", "ref2"):
        answer = page.get_by_role("article", name=name, exact=True)
        expect(answer.locator(".badge")).to_have_text("cut at max tokens")
        expect(answer.locator("dd").nth(0)).to_contain_text("s")
        expect(answer.locator("dd").nth(2)).to_have_text("12")
        assert answer.locator("pre").inner_text()
    missing = page.get_by_role("article", name="console-nobody")
    expect(missing.locator(".trouble")).to_have_text("The model `console-nobody` does not exist.")
    expect(page.locator("#toasts")).to_contain_text("base: cut at max tokens, 12 tokens")
    body = {"model": "base", "prompt": "hello", "max_tokens": 8, "temperature": 0}
    said = shared_server.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    page.get_by_text("Completion", exact=True).click()
    page.get_by_label("Max tokens").fill("8")
    page.keyboard.press("Control+Enter")
    answer = page.get_by_role("article", name="base", exact=True)
    expect(answer.locator("dd").nth(2)).to_have_text("8")
    assert answer.locator("pre").evaluate("node => node.textContent") == said


HELD_AFTER_ONE_WORD = """
  const real = window.fetch;
  window.fetch = async (path, options) => {
    const answer = await real(path, options);
    if (!path.includes("completions")) return answer;
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    const pull = async (controller) => {
      if (text) {
        await new Promise((_, fail) => options.signal.addEventListener("abort", () => fail(options.signal.reason)));
      }
      let word = null;
      while (!word) {
        text += (await reader.read()).value;
        word = text.match(/^[^]*?"content": ?"[^"][^]*?\\n\\n/);
      }
      controller.enqueue(new TextEncoder().encode(word[0]));
    };
    return new Response(new ReadableStream({ pull }, { highWaterMark: 0 }), answer);
  };
"""


def test_stop_ends_the_answers(open_page: Open) -> None:
    """The page gets one word of the server's answer and no more, so that the answer cannot end before it is stopped."""
    page = open_page("playground", prepare=lambda page: page.add_init_script(HELD_AFTER_ONE_WORD))
    page.get_by_label("Prompt").fill("hello")
    page.get_by_label("Max tokens").fill("20")
    page.keyboard.press("Control+Enter")
    answer = page.locator(".answer").first
    expect(answer.locator("pre")).not_to_be_empty()
    page.keyboard.press("Escape")
    expect(answer.locator(".badge")).to_have_text("stopped")
    expect(page.get_by_role("button", name="Run")).to_be_enabled()


def test_the_keyboard_alone_reaches_and_does_everything(
    open_page: Open, shared_server: SharedServer, tiny_model: Path
) -> None:
    push(shared_server, "console-keys", tiny_model.parent / "a0")
    page = open_page("adapters", key=ADMIN_KEY)

    def tab_to(name: str) -> None:
        for _ in range(80):
            page.keyboard.press("Tab")
            reached = page.evaluate("(document.activeElement.ariaLabel ?? document.activeElement.textContent).trim()")
            if reached == name or page.evaluate("document.activeElement.id") == name:
                ring = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
                assert ring != "none", f"{name} does not show that it has the focus"
                return
        raise AssertionError(f"Tab never reaches {name}")

    tab_to("search")
    page.keyboard.type("console-keys")
    expect(page.locator("#rows tr")).to_have_count(1)
    tab_to("console-keys")
    page.keyboard.press("Enter")
    page.wait_for_selector("#detail .versions")
    tab_to("Prefetch")
    page.keyboard.press("Enter")
    expect(page.get_by_role("spinbutton", name="Replicas")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#toasts")).to_contain_text("in the memory of 1 replica")
    tab_to("Remove")
    page.keyboard.press("Enter")
    page.keyboard.type("console-keys")
    page.keyboard.press("Enter")
    expect(page.locator("#toasts")).to_contain_text("console-keys is removed")
    assert shared_server.http.get("/v1/adapters/console-keys").status_code == 404


def test_arrow_keys_go_from_slot_to_slot(open_page: Open) -> None:
    page = open_page()
    slots = page.locator(".replica").first.locator(".slot")
    expect(slots).to_have_count(8)  # by default twice --max-loras
    slots.nth(0).focus()
    for key, number in (("ArrowRight", 1), ("End", 7), ("ArrowRight", 0), ("ArrowLeft", 7)):
        page.keyboard.press(key)
        expect(slots.nth(number)).to_be_focused()
    assert slots.evaluate_all("slots => slots.filter((one) => one.tabIndex === 0).length") == 1


def hostile_history(history: dict[str, Any] | None) -> dict[str, Any] | None:
    if history is None:
        return None
    busy = {"name": HOSTILE, "requests": 7, "tokens": 70, "series": [0] * 119 + [7]}
    return history | {"busiest": [busy], "requests": [0] * 119 + [7]}


def hostile(page: Any) -> None:
    """What the server answers has in every text what would do harm if it were taken for HTML."""

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
