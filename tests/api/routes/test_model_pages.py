"""Pages of /v1/models: in order, bounded, and rendered once until the list changes."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest

from lorafleet.api.access.caller import Caller
from lorafleet.api.access.visibility import CallersCatalog, NoTenants
from lorafleet.api.routes.model_pages import MAX_PAGES, ModelPages
from lorafleet.protocol.errors import DirectoryUnavailable
from lorafleet.protocol.limits import MAX_MODELS
from lorafleet.protocol.lora_request import LoRARequest
from tests.api.conftest import MemoryCatalog


def fill(catalog: MemoryCatalog, count: int) -> list[str]:
    catalog.loras = {name: LoRARequest(name, 1, f"/adapters/{name}") for name in (f"a{i:05}" for i in range(count))}
    return list(catalog.loras)


@pytest.mark.parametrize("limit", [1, 2, 7, 1000])
async def test_pages_behind_each_other_are_the_whole_list_in_order(
    http: httpx.AsyncClient, catalog: MemoryCatalog, limit: int
) -> None:
    names = fill(catalog, 20)
    seen: list[str] = []
    while True:
        after = {"after": seen[-1]} if seen else {}
        page = (await http.get("/v1/models", params={"limit": limit, **after})).json()
        ids = [card["id"] for card in page["data"]]
        assert len(ids) <= limit
        assert (page["first_id"], page["last_id"]) == (ids[0], ids[-1])
        seen += ids
        if not page["has_more"]:
            break
    assert seen == ["llama", "llama-alias", *names]


async def test_without_a_limit_a_page_is_bounded_and_says_that_there_are_more(
    http: httpx.AsyncClient, catalog: MemoryCatalog, client: openai.OpenAI
) -> None:
    fill(catalog, MAX_MODELS + 5)
    page = (await http.get("/v1/models")).json()
    assert (len(page["data"]), page["has_more"]) == (MAX_MODELS, True)
    models = await asyncio.to_thread(client.models.list)
    assert len(models.data) == MAX_MODELS and models.has_more  # type: ignore[attr-defined]  # beside OpenAI's fields
    last = {"after": models.data[-1].id}
    rest = await asyncio.to_thread(client.models.list, extra_query=last)
    assert len(rest.data) == 7 and not rest.has_more  # type: ignore[attr-defined]  # the same


@pytest.mark.parametrize("query", ["limit=0", f"limit={MAX_MODELS + 1}", "limit=x", f"after={'a' * 5000}", "page=2"])
async def test_a_query_out_of_bounds_is_refused_by_name(http: httpx.AsyncClient, query: str) -> None:
    refused = await http.get(f"/v1/models?{query}")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == query.partition("=")[0]


async def test_a_new_adapter_is_listed_at_once(http: httpx.AsyncClient, catalog: MemoryCatalog) -> None:
    fill(catalog, 2)
    assert len((await http.get("/v1/models")).json()["data"]) == 4
    catalog.loras["new"] = LoRARequest("new", 1, "/adapters/new")
    assert [card["id"] for card in (await http.get("/v1/models")).json()["data"]][-1] == "new"


class PrefixTenant(NoTenants):
    """Names that begin with "acme-" are kept for the tenant acme, however they are spelled."""

    def owner_of_name(self, name: str) -> str | None:  # type: ignore[override]  # the base knows of none
        return "acme" if self.kept_prefix(name) else None

    def kept_prefix(self, name: str) -> str:
        return name[:5] if name.lower().startswith("acme-") else ""


class CountedCatalog(MemoryCatalog):
    num_lists = 0

    async def listed(self, after: str, end: str, limit: int) -> list[LoRARequest]:
        self.num_lists += 1
        return await super().listed(after, end, limit)


async def test_a_page_costs_the_same_however_many_names_are_kept_for_another_tenant() -> None:
    catalog = CountedCatalog()
    names = [f"{prefix}{i:04}" for prefix in ("Acme-", "acme-") for i in range(1000)] + ["Open", "open", "public"]
    catalog.loras = {name: LoRARequest(name, 1, f"/adapters/{name}") for name in names}
    seen = CallersCatalog(catalog, PrefixTenant(), Caller("other", "key", frozenset({"infer"})))
    page, has_more = await seen.listed("", 2)
    assert ([name for name, _ in page], has_more) == (["Open", "open"], True)
    assert catalog.num_lists <= 5


async def test_a_page_is_made_once_for_all_who_ask_and_anew_when_the_list_changes() -> None:
    pages, made, goes_on = ModelPages(), 0, asyncio.Event()

    async def make() -> bytes:
        nonlocal made
        made += 1
        await goes_on.wait()
        return b"%d" % made

    asked = [asyncio.create_task(pages.get("key", 1, make)) for _ in range(50)]
    await asyncio.sleep(0)
    goes_on.set()
    assert set(await asyncio.gather(*asked)) == {b"1"}
    assert await pages.get("key", 1, make) == b"1"
    assert await pages.get("key", 2, make) == b"2"
    assert await pages.get("key", None, make) == b"3", "a list of unknown age is not kept"


async def test_pages_are_kept_in_bounds_and_errors_are_not() -> None:
    pages = ModelPages()

    async def fail() -> bytes:
        raise DirectoryUnavailable("it is away")

    async def make() -> bytes:
        return b"made"

    with pytest.raises(DirectoryUnavailable):
        await pages.get("key", 1, fail)
    assert await pages.get("key", 1, make) == b"made"
    for number in range(2 * MAX_PAGES):
        await pages.get(number, 1, make)
    assert len(pages._pages) == MAX_PAGES
