"""Lists of very many adapters: each tenant's own, a page at a time, and nobody else waits for them."""

from __future__ import annotations

import asyncio
import time

import pytest

from lorafleet.api.access.caller import Caller
from lorafleet.api.access.visibility import CallersCatalog, NoTenants
from lorafleet.cluster.admin.administration import Administration
from lorafleet.cluster.catalogue.catalogue import Catalogue
from lorafleet.cluster.catalogue.catalogue_records import AdapterRecord, AliasMove, Share, VersionRecord
from lorafleet.cluster.catalogue.folder_store import FolderStore
from lorafleet.cluster.catalogue.packed import pack
from lorafleet.cluster.console.directory_view import SEARCHES, DirectoryWindow
from lorafleet.cluster.console.view import DirectoryView, Viewer, ViewQuery
from lorafleet.cluster.directory.adapter_names import MAX_NAMES_LISTED
from lorafleet.cluster.directory.directory import AdapterDirectory
from lorafleet.protocol.errors import QueueFull
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.protocol.names import PAST_ALL, full_name
from tests.cluster.directory.conftest import loaded

NUM_EACH = 30_000  # of a tenant, of another, and public


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> AdapterDirectory:
    made = AdapterDirectory(Catalogue(FolderStore(tmp_path_factory.mktemp("catalogue"))))
    asyncio.run(_fill(made))
    return made


async def _fill(directory: AdapterDirectory) -> None:
    await loaded(directory)
    for tenant in (None, "acme", "other"):
        for number in range(NUM_EACH):
            name = full_name(tenant, f"a{number:05}")
            moves = {name: (AliasMove(0.0, (Share(1, 1.0),)),)}
            entry = AdapterRecord(name, (VersionRecord(1, f"{name} digest", "", 8, 1, 0.0),), moves, tenant=tenant)
            directory.catalogue.state.apply(pack(entry))
    directory.catalogue.state.sort_names()


class View:
    """backend.AdapterCatalog as far as lists go."""

    def __init__(self, directory: AdapterDirectory) -> None:
        self.directory = directory
        self.num_calls = 0

    async def listed(self, after: str, end: str, limit: int) -> list[LoRARequest]:
        self.num_calls += 1
        return await self.directory.names.list_loras(self.directory.epoch.id, after, end, limit)


async def test_a_tenant_s_page_costs_two_lookups_however_many_adapters_others_have(directory: AdapterDirectory) -> None:
    view = View(directory)
    catalog = CallersCatalog(view, NoTenants(), Caller("acme"))  # type: ignore[arg-type]  # nothing else is called
    page, has_more = await catalog.listed("a00009", 1000)
    assert [name for name, _ in page] == [f"a{number:05}" for number in range(10, 1010)]
    assert {lora.lora_name for _, lora in page} == {full_name("acme", name) for name, _ in page}, "its own come first"
    assert has_more and view.num_calls == 2


async def test_the_directory_goes_on_while_it_lists(directory: AdapterDirectory) -> None:
    lists = [
        asyncio.create_task(directory.names.list_loras(directory.epoch.id, "", PAST_ALL, MAX_NAMES_LISTED)),
        asyncio.create_task(Administration(directory, ["base"]).list_adapters("", 1000)),
        asyncio.create_task(DirectoryWindow(directory).view(ViewQuery(search="29999"), Viewer("acme", sees_all=False))),
    ]
    turns = 0
    while not all(one.done() for one in lists):
        await asyncio.sleep(0)
        turns += 1
    assert turns > 20, "others have had their turn"
    assert [len(lists[0].result()), len(lists[1].result())] == [MAX_NAMES_LISTED, 1000]
    assert [one.name for one in lists[2].result().adapters] == [full_name("acme", "a29999")]


async def test_a_page_of_the_console_looks_at_no_more_names_than_it_shows(directory: AdapterDirectory) -> None:
    window, viewer = DirectoryWindow(directory), Viewer("acme", sees_all=False)
    candidates = list(window._candidates("a00100", viewer, 51))
    assert len(candidates) == 102
    view = await window.view(ViewQuery(after="a00100"), viewer)
    assert [one.name for one in view.adapters] == [full_name("acme", f"a{n:05}") for n in range(101, 151)]


async def test_searches_of_all_names_wait_in_bounds_and_no_tenant_s_for_all_of_another_s(
    directory: AdapterDirectory,
) -> None:
    window, query = DirectoryWindow(directory), ViewQuery(search="a2999")

    def search(tenant: str) -> asyncio.Task[DirectoryView]:
        return asyncio.create_task(window.view(query, Viewer(tenant, sees_all=False)))

    loud = [search("loud") for _ in range(SEARCHES.waiting + 4)]
    await search("acme")
    assert sum(one.done() and one.exception() is None for one in loud) <= 2, "it came after one turn of the other"
    ended = await asyncio.gather(*loud, return_exceptions=True)
    assert sum(isinstance(one, QueueFull) for one in ended) == 3


async def test_a_tenant_s_adapters_are_paged_in_order_without_those_that_go(directory: AdapterDirectory) -> None:
    admin, state = Administration(directory, ["base"]), directory.catalogue.state
    gone = [full_name("acme", f"a{number:05}") for number in range(0, 20, 2)]
    for name in gone:
        state.apply(pack(AdapterRecord(name, state.adapters[name].versions, removing=True)))
    page = await admin.list_adapters("", 10, "acme")
    assert [one.name for one in page] == [full_name("acme", f"a{number:05}") for number in range(1, 20, 2)]
    began_s = time.monotonic()
    assert len(await admin.list_adapters("", 10)) == 10
    assert time.monotonic() - began_s < 60
