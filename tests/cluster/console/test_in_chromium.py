"""The console in a real browser against a real server: every action, by mouse and by keyboard.

With tenants' keys: test_keys_in_chromium.py; what it shows: test_views_in_chromium.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cluster.console.chromium import (
    CHROMIUM,
    Open,
    act,
    ask,
    choose_folder,
    enter_key,
    expect,
    push,
    show_adapter,
    shown,
    submit,
)
from tests.cluster.harness import ADMIN_KEY, SharedServer

pytestmark = [
    pytest.mark.xdist_group("shared_server"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
]


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


def test_a_choice_that_takes_effect_behind_a_click_does_not_undo_it(
    open_page: Open, shared_server: SharedServer, tiny_model: Path
) -> None:
    push(shared_server, "console-late", tiny_model.parent / "a2")
    page = open_page("adapters", key=ADMIN_KEY)
    page.evaluate("""() => {
      const order = document.getElementById("order");
      order.value = "busiest";
      location.hash = "#/adapters/console-late";  // as a click does; its event comes later
      order.dispatchEvent(new Event("change"));
    }""")
    page.wait_for_selector("#detail .versions")
    page.keyboard.press("Escape")
    page.wait_for_url("**/console#/adapters?order=busiest")
    shared_server.http.delete("/v1/adapters/console-late").raise_for_status()


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
