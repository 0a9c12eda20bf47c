"""What the console is sent: pages of adapters, replicas and their slots, and to each viewer no more than is theirs."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import pytest

from lorafleet.api.access.caller import Caller
from lorafleet.api.access.visibility import NoTenants
from lorafleet.api.routes.build_api import build_api
from lorafleet.api.telemetry.traffic_history import NUM_BUCKETS, TrafficHistory
from lorafleet.cluster.catalogue.catalogue import Catalogue
from lorafleet.cluster.catalogue.catalogue_records import AdapterRecord, Share, VersionRecord, moved
from lorafleet.cluster.catalogue.folder_store import FolderStore
from lorafleet.cluster.console.directory_view import DirectoryWindow
from lorafleet.cluster.console.replica_view import replica_view
from lorafleet.cluster.console.state_api import StateApi
from lorafleet.cluster.console.view import AdapterView, DirectoryView, ReplicaQuery, ReplicaView, Viewer, ViewQuery
from lorafleet.cluster.directory.directory import AdapterDirectory
from lorafleet.cluster.directory.directory_calls import DoneCall, JoinCall
from lorafleet.cluster.directory.residency import Report
from lorafleet.cluster.routing.routing import ReplicaLoad
from lorafleet.protocol.errors import AdapterMissing, to_wire
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.protocol.messages import DraftCounts, EngineStats
from lorafleet.protocol.names import tenant_of
from state_fronts import ADMIN_KEY, bare_front

KEYS = {
    "key of acme": Caller("acme", "k1", frozenset(("infer",))),
    "key of other": Caller("other", "k2", frozenset(("infer", "admin"))),
    "key of nobody": Caller(None, "k3", frozenset(("infer",))),
    "key for metrics": Caller(None, "k4", frozenset(("metrics",))),
}


def adapter(name: str, alias: str | None = None) -> AdapterRecord:
    """name: full."""
    versions = tuple(VersionRecord(number, f"{name} {number}", "s3://secret", 8, 1000, 1.0) for number in (1, 2))
    made = moved(AdapterRecord(name, versions, tenant=tenant_of(name)), name, (Share(1, 1.0),), 10.0)
    return moved(made, alias, (Share(2, 1.0),), 20.0) if alias else made


class Cluster:
    """A directory and one replica, in one process, behind the real routes."""

    def __init__(self, folder: Path, keys: dict[str, Caller] | None) -> None:
        self.directory = AdapterDirectory(Catalogue(FolderStore(folder)))
        self.window = DirectoryWindow(self.directory)
        self.stats = EngineStats(lora_slots_total=4)
        self.front = bare_front(keys, self.stats)
        self.behind_s = 0.0
        history = TrafficHistory(lambda: time.time() - self.behind_s)
        self.front.telemetry = replace(self.front.telemetry, history=history)
        self.sequence = 0
        self.looked: Callable[[ViewQuery], None] = lambda _: None
        api = StateApi(self.view, self.view_adapter, self.view_replicas)
        transport = httpx.ASGITransport(cast(Any, build_api(lambda: self.front, api.routes())))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    async def view(self, query: ViewQuery, viewer: Viewer) -> DirectoryView:
        self.looked(query)
        return await self.window.view(query, viewer)

    async def view_adapter(self, name: str, viewer: Viewer) -> AdapterView | None:
        return self.window.adapter(name, viewer)

    async def view_replicas(self, query: ReplicaQuery, viewer: Viewer) -> list[ReplicaView]:
        return [replica_view(self.front, query, viewer, cpu_loras=8, max_num_seqs=16)]

    async def put(self, *adapters: AdapterRecord) -> None:
        for one in adapters:
            await self.directory.catalogue.change(one.name, lambda _, made=one: made)

    async def join(self) -> None:
        self.directory.leases.join("r0", "", [], [], True)

    def hold(self, slots: list[str], in_cpu: list[str], waiting: list[str] | None = None) -> None:
        waiting = waiting or []
        self.stats = msgspec.structs.replace(
            self.stats, resident_slots=slots, resident_cpu=in_cpu, waiting_adapters=waiting, num_running=3
        )
        cast(Any, self.front).engine.stats = self.stats
        self.sequence += 1
        tiers: dict[str, Any] = dict.fromkeys(in_cpu, "cpu") | dict.fromkeys(waiting, "coming")
        tiers |= dict.fromkeys(filter(None, slots), "gpu")
        self.directory.routers.accept(Report("r0", self.sequence, True, tiers, ReplicaLoad(num_running=3)))

    async def get(self, path: str = "/v1/console/state", key: str | None = None, **query: Any) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return await self.http.get(path, params=query, headers=headers)

    async def state(self, key: str | None = None, **query: Any) -> dict[str, Any]:
        response = await self.get(key=key, **query)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found


async def cluster_of(folder: Path, keys: dict[str, Caller] | None) -> Cluster:
    made = Cluster(folder, keys)
    await made.directory.load()
    await made.join()
    return made


@pytest.fixture
async def open_cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = await cluster_of(tmp_path, None)
    yield cluster
    await cluster.http.aclose()


@pytest.fixture
async def shared(tmp_path: Path) -> AsyncIterator[Cluster]:
    """With keys; one public adapter, one of each tenant, all in slots, and traffic and errors of both."""
    cluster = await cluster_of(tmp_path, KEYS)
    await cluster.put(adapter("public"), adapter("~acme/sql"), adapter("~other/law", "~other/law-next"))
    cluster.hold(["~other/law 1", "~acme/sql 1", "", "public 1"], ["~other/law 1", "public 1"], ["~other/law 2"])
    for tenant, name in (("acme", "public"), ("other", "public"), ("other", "~other/law-next"), ("acme", "")):
        cluster.front.telemetry.recent.count(tenant, name, 10, 20, 0.1, failed=False)
    for tenant, name in (("acme", "~acme/sql"), ("other", "~other/law"), (None, "")):
        cluster.front.telemetry.failures.record(AdapterMissing(f"no files of {name}"), name, tenant)
    lora = LoRARequest("~other/law", 1, "s3://secret", "~other/law 1")
    cluster.directory.replicas.order("r0", "load", lora)
    yield cluster
    await cluster.http.aclose()


def names(state: dict[str, Any]) -> list[str]:
    return [one["name"] for one in state["adapters"]]


async def test_pages_of_names_have_every_adapter_once(open_cluster: Cluster) -> None:
    await open_cluster.put(*(adapter(f"a{number:03d}") for number in range(57)))
    seen: list[str] = []
    after = ""
    while True:
        page = await open_cluster.state(after=after, limit=10)
        seen += names(page)
        after = page["after"]
        if not page["has_more"]:
            break
    assert seen == [f"a{number:03d}" for number in range(57)]
    assert page["num_adapters"] == 57


async def test_the_share_of_accepted_drafts_is_shown_by_adapter_and_in_total(open_cluster: Cluster) -> None:
    await open_cluster.put(adapter("drafted"), adapter("plain"))
    recent = open_cluster.front.telemetry.recent
    recent.count(None, "drafted", 10, 20, 0.1, failed=False, drafts=DraftCounts(2, 8, 6))
    recent.count(None, "plain", 10, 20, 0.1, failed=False)
    state = await open_cluster.state()
    assert {one["name"]: one["traffic"]["accepted_drafts"] for one in state["adapters"]} == {
        "drafted": 0.75,
        "plain": None,
    }
    assert state["total"]["accepted_drafts"] == 0.75
    assert state["base"]["accepted_drafts"] is None


async def test_search_finds_names_and_aliases_whatever_their_case(open_cluster: Cluster) -> None:
    await open_cluster.put(adapter("org/SQL-tool"), adapter("law", "sql-law"), adapter("poet"))
    assert names(await open_cluster.state(search="sql")) == ["law", "org/SQL-tool"]
    assert names(await open_cluster.state(search="sql", after="law")) == ["org/SQL-tool"]
    assert names(await open_cluster.state(search="<script>")) == []


async def test_the_busiest_come_first_under_whatever_name_they_were_asked_for(open_cluster: Cluster) -> None:
    await open_cluster.put(adapter("calm"), adapter("busy", "hot"), adapter("idle"))
    for name, count in (("calm", 1), ("hot", 3), ("gone", 9)):
        for _ in range(count):
            open_cluster.front.telemetry.recent.count(None, name, 1, 1, 0.1, failed=False)
    state = await open_cluster.state(order="busiest")
    assert names(state) == ["busy", "calm"]
    assert [one["traffic"]["requests"] for one in state["adapters"]] == [3, 1]


async def test_slots_are_told_by_their_number_and_adapters_by_their_tiers(open_cluster: Cluster) -> None:
    await open_cluster.put(adapter("sql"), adapter("law"))
    open_cluster.hold(["", "law 1", "", "sql 2"], ["sql 1", "sql 2"], ["law 2"])
    state = await open_cluster.state()
    [replica] = state["replicas"]
    assert replica["slots"] == ["", "law 1", "", "sql 2"]
    assert (replica["state"], replica["cpu_loras"], replica["num_running"]) == ("ready", 8, 3)
    assert {state["names"][digest] for digest in replica["in_cpu"]} == {"sql"}
    [law, sql] = state["adapters"]
    assert [one["tiers"] for one in law["versions"]] == [{"r0": "gpu"}, {"r0": "coming"}]
    assert [one["tiers"] for one in sql["versions"]] == [{"r0": "cpu"}, {"r0": "gpu"}]
    assert [(one["adapter"], one["kind"]) for one in state["loads"]] == [("law", "read")]


async def test_orders_and_their_failures_are_told_with_their_replica(open_cluster: Cluster) -> None:
    await open_cluster.put(adapter("sql"))
    directory, lora = open_cluster.directory, LoRARequest("sql", 1, "/sql", "sql 1")
    answer = directory.replicas.order("r0", "pin", lora)
    [load] = (await open_cluster.state())["loads"]
    assert (load["replica"], load["adapter"], load["kind"]) == ("r0", "sql", "pin")
    epoch = directory.leases.join("r0", "", [], [], True).epoch
    await directory.ask(DoneCall("r0", epoch, 1, None, to_wire(AdapterMissing("no files"))))
    assert isinstance(answer.exception(), AdapterMissing)
    state = await open_cluster.state()
    assert state["loads"] == []
    [failure] = state["failures"]
    assert (failure["replica"], failure["adapter"], failure["code"]) == ("r0", "sql", "AdapterMissing")


async def test_an_adapter_is_shown_with_the_history_of_its_names(open_cluster: Cluster) -> None:
    await open_cluster.put(moved(adapter("org/sql"), "org/sql", (Share(1, 1.0), Share(2, 3.0)), 30.0))
    shown = (await open_cluster.get("/v1/console/adapters/org/sql")).json()
    assert shown["aliases"] == {"org/sql": {"1": 1.0, "2": 3.0}}
    assert [one["at_s"] for one in shown["history"]["org/sql"]] == [10.0, 30.0]
    assert (await open_cluster.get("/v1/console/adapters/none")).status_code == 404


async def test_what_the_page_has_already_is_not_sent_again(open_cluster: Cluster) -> None:
    await open_cluster.put(adapter("sql"))
    first = await open_cluster.get()
    headers = {"if-none-match": first.headers["etag"]}
    assert (await open_cluster.http.get("/v1/console/state", headers=headers)).status_code == 304
    await open_cluster.put(adapter("law"))
    assert (await open_cluster.http.get("/v1/console/state", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "query", [{"limit": 0}, {"limit": 201}, {"search": "x" * 300}, {"order": "size"}, {"more": 1}, {"history": "all"}]
)
async def test_a_query_out_of_its_bounds_is_refused(open_cluster: Cluster, query: dict[str, Any]) -> None:
    assert (await open_cluster.get(**query)).status_code == 400


async def test_without_keys_all_is_shown_and_only_administration_needs_the_admin_key(open_cluster: Cluster) -> None:
    await open_cluster.put(adapter("~acme/private"))
    state = await open_cluster.state()
    assert names(state) == ["~acme/private"] and state["viewer"]["sees_all"]
    assert state["viewer"]["cannot_administer"]["code"] == "invalid_api_key"
    assert (await open_cluster.state(ADMIN_KEY))["viewer"]["cannot_administer"] is None


async def test_with_keys_nothing_is_told_without_one(shared: Cluster) -> None:
    for path in ("/v1/console/state", "/v1/console/adapters/public"):
        assert (await shared.get(path)).status_code == 401
        assert (await shared.get(path, "no such key")).status_code == 401
        assert (await shared.get(path, "key for metrics")).status_code == 403


async def test_the_operator_sees_every_tenant(shared: Cluster) -> None:
    state = await shared.state(ADMIN_KEY)
    assert names(state) == ["public", "~acme/sql", "~other/law"]
    assert state["replicas"][0]["slots"] == ["~other/law 1", "~acme/sql 1", "", "public 1"]
    assert (state["total"]["requests"], len(state["failures"]), len(state["loads"])) == (4, 3, 2)


async def test_a_tenant_sees_its_own_and_what_is_public_and_nothing_of_others(shared: Cluster) -> None:
    response = await shared.get(key="key of acme")
    state = response.json()
    assert names(state) == ["public", "sql"]
    [replica] = state["replicas"]
    assert replica["slots"] == ["", "~acme/sql 1", "", "public 1"]
    assert replica["in_cpu"] == ["public 1"]
    assert "num_running" not in replica and state["load"] is None and state["num_adapters"] is None
    assert state["total"]["requests"] == 2 and state["base"]["requests"] == 1
    assert [one["traffic"]["requests"] for one in state["adapters"]] == [1, 0]
    assert [(one["adapter"], one["message"]) for one in state["failures"]] == [("sql", "no files of sql")]
    assert state["loads"] == []
    for word in ("law", "other", "secret"):
        assert word not in response.text
    for query in ({"search": "law"}, {"order": "busiest"}, {"after": "public"}):
        assert "law" not in (await shared.get(key="key of acme", **query)).text


async def test_another_tenants_adapter_is_as_missing_as_one_that_is_not_there(shared: Cluster) -> None:
    missing = await shared.get("/v1/console/adapters/no", "key of acme")
    assert missing.status_code == 404
    for name in ("law", "law-next", "~other/law"):
        hidden = await shared.get(f"/v1/console/adapters/{name}", "key of acme")
        assert (hidden.status_code, hidden.json()["error"]["message"]) == (
            404,
            missing.json()["error"]["message"].replace("no`", f"{name}`").replace("~other/law", "(not yours)"),
        )
    assert (await shared.get("/v1/console/adapters/law", "key of other")).json()["name"] == "law"
    assert (await shared.get("/v1/console/adapters/~other/law", ADMIN_KEY)).json()["tenant"] == "other"


async def test_a_tenants_own_adapter_stands_before_a_public_one_of_its_name(shared: Cluster) -> None:
    await shared.put(adapter("sql"))
    assert [one["tenant"] for one in (await shared.state("key of acme"))["adapters"]] == [None, "acme"]
    assert (await shared.get("/v1/console/adapters/sql", "key of acme")).json()["tenant"] == "acme"
    assert [one["tenant"] for one in (await shared.state("key of other"))["adapters"]] == ["other", None, None]


class Kept(NoTenants):
    """Public names that begin with "kept/" are kept for the tenant "other"."""

    def owner_of_name(self, name: str) -> str | None:  # type: ignore[override]  # the base knows of none
        return "other" if name.startswith("kept/") else None

    def kept_prefix(self, name: str) -> str:
        return "kept/" if name.startswith("kept/") else ""


async def test_a_tenant_pages_through_its_own_and_public_names_alike(shared: Cluster) -> None:
    await shared.put(*(adapter(f"{owner}m{n}") for n in range(4) for owner in ("", "~acme/own-")), adapter("z"))
    seen: list[str] = []
    page = await shared.state("key of acme", limit=1)
    while page["has_more"]:
        seen += names(page)
        page = await shared.state("key of acme", limit=1, after=page["after"])
    assert seen + names(page) == ["m0", "m1", "m2", "m3", "own-m0", "own-m1", "own-m2", "own-m3", "public", "sql", "z"]


@pytest.mark.parametrize("search", ["", "t"])
async def test_names_that_are_kept_for_another_tenant_are_skipped_in_one_step(shared: Cluster, search: str) -> None:
    cast(Any, shared.front.models).tenants = Kept()
    looks: list[ViewQuery] = []
    shared.looked = looks.append
    await shared.put(*(adapter(f"kept/{number:03}") for number in range(300)), adapter("late"), adapter("not-kept"))
    await shared.put(adapter("~acme/kept/150"))
    found = await shared.state("key of acme", limit=1, after="kept", search=search)
    assert (names(found), found["has_more"]) == (["kept/150"], True), "its own name is no other tenant's"
    found = await shared.state("key of acme", limit=1, after="kept/150", search=search)
    assert names(found) == ["late"] and len(looks) < 10
    assert "kept/0" not in (await shared.get(key="key of acme", search=search)).text


async def test_public_names_kept_for_a_tenant_are_told_to_it_alone_and_pages_have_no_holes(shared: Cluster) -> None:
    cast(Any, shared.front.models).tenants = Kept()
    await shared.put(*(adapter(f"kept/{number}") for number in range(5)), adapter("a"), adapter("z"))
    page = await shared.state("key of acme", limit=2)
    assert (names(page), page["after"], page["has_more"]) == (["a", "public"], "public", True)
    page = await shared.state("key of acme", limit=2, after="public")
    assert (names(page), page["has_more"]) == (["sql", "z"], False)
    assert "kept" not in (await shared.get(key="key of acme")).text
    assert (await shared.get("/v1/console/adapters/kept/1", "key of acme")).status_code == 404
    assert "kept/1" in names(await shared.state("key of other"))


def count_for_charts(cluster: Cluster, tenant: str | None, name: str, times: int = 1) -> None:
    """Counts requests that ended twenty seconds ago."""
    cluster.behind_s = 20.0
    for _ in range(times):
        cluster.front.telemetry.history.count(tenant, name, 10, 20, 0.1, 0.5, failed=False)
    cluster.behind_s = 0.0


async def test_time_series_are_sent_only_if_they_are_requested(open_cluster: Cluster) -> None:
    await open_cluster.put(adapter("sql"), adapter("law"))
    count_for_charts(open_cluster, None, "sql", 3)
    count_for_charts(open_cluster, None, "law")
    assert (await open_cluster.state())["history"] is None
    for query in ({"history": "true"}, {"history": "true", "replica": "r0"}):
        history = (await open_cluster.state(**query))["history"]
        assert (sum(history["requests"]), sum(history["tokens"]), len(history["requests"])) == (4, 80, NUM_BUCKETS)
        assert [(one["name"], one["requests"], one["tokens"]) for one in history["busiest"]] == [
            ("sql", 3, 60),
            ("law", 1, 20),
        ]
    assert (await open_cluster.state(history="true", replica="gone"))["history"] is None


async def test_one_replica_can_be_shown_alone(open_cluster: Cluster) -> None:
    await open_cluster.directory.ask(JoinCall("r1", "", [], [], True))
    assert [one["replica"] for one in (await open_cluster.state())["replicas"]] == ["r0", "r1"]
    alone = await open_cluster.state(replica="r0")
    assert ([one["replica"] for one in alone["replicas"]], alone["more_replicas"]) == (["r0"], False)
    assert (await open_cluster.state(replica="gone"))["replicas"] == []


async def test_a_tenants_charts_have_its_own_requests_and_no_names_of_others(shared: Cluster) -> None:
    for tenant, name in (("acme", "~acme/sql"), ("acme", "public"), ("other", "~other/law"), (None, "~other/law")):
        count_for_charts(shared, tenant, name)
    count_for_charts(shared, "acme", "~acme/sql+public")
    count_for_charts(shared, "acme", "")
    response = await shared.get(key="key of acme", history="true")
    history = response.json()["history"]
    assert [one["name"] for one in history["busiest"]] == ["public", "sql", "sql+public"]
    assert (sum(history["requests"]), history["base"]["requests"], history["slot_loads"]) == (4, 1, None)
    assert "law" not in response.text and "other" not in response.text
    nobody = await shared.get(key="key of nobody", history="true")
    assert nobody.json()["history"]["busiest"] == [] and "law" not in nobody.text
    operator = (await shared.state(ADMIN_KEY, history="true"))["history"]
    assert {one["name"]: one["requests"] for one in operator["busiest"]}["~other/law"] == 2


async def test_a_public_name_that_is_kept_for_a_tenant_is_in_no_other_tenants_charts(shared: Cluster) -> None:
    shared.front.models.tenants = Kept()
    for tenant in ("acme", "other"):
        count_for_charts(shared, tenant, "kept/1")
    assert "kept" not in (await shared.get(key="key of acme", history="true")).text
    assert "kept/1" in (await shared.get(key="key of other", history="true")).text


async def test_an_alias_leads_to_its_adapter(open_cluster: Cluster) -> None:
    await open_cluster.put(adapter("sql", "sql-next"))
    assert (await open_cluster.get("/v1/console/adapters/sql-next")).json()["name"] == "sql"


async def test_a_key_of_no_tenant_sees_what_is_public_alone(shared: Cluster) -> None:
    state = await shared.state("key of nobody")
    assert names(state) == ["public"]
    assert (state["total"]["requests"], state["failures"]) == (0, [])
    assert state["replicas"][0]["slots"] == ["", "", "", "public 1"]
