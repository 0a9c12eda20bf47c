"""The page's files: whole, from here alone, and asked for anew without being sent again."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any, cast

import httpx
import pytest

from lorafleet.api.routes.build_api import build_api
from lorafleet.cluster.console.page import PAGE_ROUTES, STATIC
from lorafleet.protocol.adapter_formats.adapter_files import BIN_NAME, CONFIG_NAME, LANGUAGE_NAMES, SAFETENSORS_NAME
from state_fronts import bare_front


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    front = bare_front(keys={})
    transport = httpx.ASGITransport(cast(Any, build_api(lambda: front, PAGE_ROUTES)))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


async def test_the_page_opens_without_a_key_and_forbids_what_is_not_its_own(http: httpx.AsyncClient) -> None:
    response = await http.get("/console")
    assert response.status_code == 200 and response.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["trusted-types"] == "'none'"
    assert response.headers["x-content-type-options"] == "nosniff"


async def test_every_file_is_there_and_is_sent_once(http: httpx.AsyncClient) -> None:
    for file in STATIC.iterdir():
        path = "/console" if file.name == "index.html" else f"/console/{file.name}"
        response = await http.get(path)
        assert (response.status_code, response.content) == (200, file.read_bytes()), file.name
        assert response.headers["cache-control"] == "no-cache"
        again = await http.get(path, headers={"if-none-match": response.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


async def test_other_names_are_404_and_a_slash_leads_to_the_page(http: httpx.AsyncClient) -> None:
    for name in ("nothing.js", "index.html", "..%2fpage.py", "%2e%2e/page.py"):
        assert (await http.get(f"/console/{name}")).status_code == 404, name
    response = await http.get("/console/")
    assert (response.status_code, response.headers["location"]) == (308, "../console")


def test_files_make_no_html_of_strings_and_name_nothing_elsewhere() -> None:
    for file in STATIC.iterdir():
        text = file.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            file
        )
        assert not re.search(r"\son[a-z]+=\"|<script>|<style|\sstyle=\"|javascript:", text), file
        assert set(re.findall(r"https?://[^\"'\s)]+", text)) <= {"http://www.w3.org/2000/svg"}, file


def test_a_pushed_folder_is_sent_with_every_file_that_serving_reads() -> None:
    named = set(re.findall(r'"([\w.]+\.(?:json|jinja|safetensors|bin))"', (STATIC / "push.js").read_text()))
    assert named == {CONFIG_NAME, SAFETENSORS_NAME, BIN_NAME, *LANGUAGE_NAMES}
