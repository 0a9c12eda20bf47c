"""What is a tenant's own is for its callers alone: whatever route, name or state it is asked for by."""

from __future__ import annotations

import base64
import io
import json
import os
import random
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from lorafleet.api.access.caller import Caller
from lorafleet.api.routes.build_api import ROUTES
from lorafleet.client.packing import pack
from lorafleet.client.shared_memory import shared_tensors
from lorafleet.client.tensor_packing import pack_shared
from lorafleet.cluster.admin.admin_api import admin_routes
from lorafleet.cluster.admin.download_api import MAX_DOWNLOADS
from lorafleet.cluster.admin.upload_tar import MAX_TAR_BYTES, MAX_UPLOAD_BYTES
from lorafleet.cluster.tenancy.usage_sums import summed
from lorafleet.protocol.adapter_formats.adapter_files import folder_digest
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.resolvers.filesystem import FilesystemResolver
from tests.cluster.tenancy.house import House, error_of, tokens_of

KINDS = ("all", "qv", "regex", "layers")


@pytest.fixture
def adapters(fleet: Callable[[str], Any]) -> dict[str, Path]:
    return {kind: fleet("llama3").adapters[kind] for kind in KINDS}


def pack_folder(folder: Path) -> bytes:
    packed = io.BytesIO()
    pack(folder, packed)
    return packed.getvalue()


async def answers(house: House, adapters: dict[str, Path]) -> dict[str | None, list[int]]:
    """Of each kind, and of the base: all differ."""
    found: dict[str | None, list[int]] = {None: tokens_of(await house.complete("public", "base"))}
    for kind in KINDS:
        assert (await house.push("operator", f"reference-{kind}", adapters[kind])).status_code == 200
        found[kind] = tokens_of(await house.complete("public", f"reference-{kind}"))
    assert len(set(map(tuple, found.values()))) == len(found)
    return found


def asked_for(name: str) -> list[tuple[str, str, dict[str, Any] | None]]:
    """Every way to name an adapter. Routes for administration come last."""
    chat = {"model": name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    return [
        ("POST", "/v1/completions", {"model": name, "prompt": "hi", "max_tokens": 1}),
        ("POST", "/v1/completions", {"model": f"base:{name}", "prompt": "hi", "max_tokens": 1}),
        ("POST", "/v1/completions", {"model": f"{name}+{name}", "prompt": "hi", "max_tokens": 1}),
        ("POST", "/v1/completions", {"model": f"reference-all+{name}", "prompt": "hi", "lora_weights": [1, 1]}),
        ("POST", "/v1/completions", {"model": name, "prompt": "hi", "max_tokens": 1, "stream": True}),
        ("POST", "/v1/chat/completions", chat),
        ("POST", "/v1/responses", {"model": name, "input": "hi", "max_output_tokens": 16}),
        ("POST", "/v1/responses/input_tokens", {"model": name, "input": "hi"}),
        ("POST", "/v1/messages", chat),
        ("POST", "/v1/messages/count_tokens", {"model": name, "messages": chat["messages"]}),
        ("POST", "/v1/embeddings", {"model": name, "input": "hi"}),
        ("POST", "/generate", {"text": "hi", "lora_path": name}),
        ("POST", "/inference/v1/generate", {"model": name, "token_ids": [5], "sampling_params": {"max_tokens": 1}}),
        ("POST", "/v1/chat/completions/render", chat),
        ("POST", "/tokenize", {"model": name, "prompt": "hi"}),
        ("POST", "/detokenize", {"model": name, "tokens": [5]}),
        ("GET", f"/v1/models/{name}", None),
        ("GET", f"/v1/models/base:{name}", None),
        ("POST", "/pooling", {"model": name, "input": "hi", "task": "embed"}),
        ("POST", "/classify", {"model": name, "input": "hi"}),
        *(("POST", path, {"model": name, "text_1": "hi", "text_2": "hi"}) for path in ("/score", "/v1/score")),
        *(
            ("POST", path, {"model": name, "query": "hi", "documents": ["hi"]})
            for path in ("/rerank", "/v1/rerank", "/v2/rerank")
        ),
        ("POST", "/v1/unload_lora_adapter", {"lora_name": name}),
        ("POST", "/unload_lora_adapter", {"lora_name": name}),
        ("GET", f"/v1/adapters/{name}", None),
        ("POST", f"/v1/adapters/{name}/pin", {}),
        ("POST", f"/v1/adapters/{name}/unpin", {}),
        ("DELETE", f"/v1/adapters/{name}", None),
        ("DELETE", f"/v1/adapters/{name}?alias={name}", None),
        ("POST", f"/v1/adapters/{name}/alias", {"version": 1, "alias": "stolen"}),
        ("POST", f"/v1/adapters/{name}/rollback", {}),
        ("POST", f"/v1/adapters/{name}/prefetch", {}),
        ("POST", f"/v1/adapters/{name}/verify", {}),
        ("POST", f"/v1/adapters/{name}/download", {}),
        ("POST", f"/v1/adapters/{name}/download", {"version": 1}),
    ]


def test_every_route_that_takes_an_adapter_s_name_is_asked() -> None:
    """Those of the console are in tests/cluster/console/test_state_api.py; a push makes an adapter of the caller's."""
    unused: Any = None
    taken = {(method, path.partition("?")[0].replace("secret", "NAME")) for method, path, _ in asked_for("secret")}
    nameless = {"/v1/models", "/v1/adapters", "/v1/load_lora_adapter", "/load_lora_adapter", "/metrics"}
    nameless |= {"/server_info", "/get_world_size", "/model_info", "/get_model_info", "/skyrl/v1/load_lora_adapter"}
    pushes = {"/v1/adapters/NAME/files", "/v1/adapters/NAME/tensors"}
    for method, path, needed, _ in [*ROUTES, *admin_routes(unused)]:
        named = path.replace("{name:path}", "NAME").replace("{model:path}", "NAME")
        is_response = path.startswith("/v1/responses/{response_id}")  # which no adapter's name leads to
        assert needed == "open" or is_response or named in nameless | pushes or (method, named) in taken, path


async def test_another_tenant_s_adapter_is_as_one_that_never_was(house: House, adapters: dict[str, Path]) -> None:
    async with house.open():
        await answers(house, adapters)
        assert (await house.push("acme", "secret", adapters["qv"])).status_code == 200
        alias = {"version": 1, "alias": "secret-alias"}
        assert (await house.ask("acme", "POST", "/v1/adapters/secret/alias", alias)).status_code == 200
        await house.complete("acme", "secret")  # resident from now on
        for caller in ("rival", "public"):
            for name in ("secret", "secret-alias", "~acme/secret", "~acme/secret-alias"):
                never = name.replace("secret", "nobody")
                for got, other in zip(asked_for(name), asked_for(never), strict=True):
                    answer = error_of(await house.ask(caller, *got), name)
                    assert answer == error_of(await house.ask(caller, *other), never), (caller, got)
                    assert answer[0] in (400, 403, 404), (caller, got, answer)
                    assert b"acme" not in answer[1].replace(b"NAME", b"")
            shown = json.dumps((await house.ask(caller, "GET", "/v1/models")).json())
            assert "secret" not in shown and "acme" not in shown
        assert (await house.ask("rival", "GET", "/v1/adapters")).json()["data"] == []
        for got in asked_for("secret")[:16]:
            if "+" not in json.dumps(got[2]) or "reference" in json.dumps(got[2]):
                assert (await house.ask("acme", *got)).status_code == 200, got


async def test_a_tenant_learns_no_path_of_the_server_from_the_list_of_models(
    house: House, adapters: dict[str, Path]
) -> None:
    async with house.open():
        await answers(house, adapters)
        assert (await house.push("acme", "mine", adapters["qv"])).status_code == 200
        assert (await house.ask("acme", "GET", "/v1/models/mine+reference-all")).json()["root"] == "mine+reference-all"
        for caller in ("acme", "rival", "public"):
            listed = (await house.ask(caller, "GET", "/v1/models")).json()["data"]
            shown = [(await house.ask(caller, "GET", f"/v1/models/{card['id']}")).json() for card in listed]
            assert all(card["root"] == card["id"] for card in [*listed, *shown])
        cards = (await house.ask("operator", "GET", "/v1/models")).json()["data"]
        roots = {card["id"]: card["root"] for card in cards}
        assert roots.pop("base") == "/models/base"
        assert "~acme/mine" in roots and all(root == name for name, root in roots.items())  # Uploads have no path.


async def test_two_tenants_have_the_same_name_and_neither_learns_of_it(house: House, adapters: dict[str, Path]) -> None:
    async with house.open():
        expected = await answers(house, adapters)
        for caller, kind in (("acme", "all"), ("rival", "regex"), ("operator", "qv")):
            pushed = await house.push(caller, "sql", adapters[kind])
            assert pushed.status_code == 200 and [one["number"] for one in pushed.json()["versions"]] == [1]
            assert pushed.json()["id"] == "sql" and list(pushed.json()["aliases"]) == ["sql"]
        for caller, kind in (("acme", "all"), ("rival", "regex"), ("public", "qv")):
            assert tokens_of(await house.complete(caller, "sql")) == expected[kind]
            assert tokens_of(await house.complete(caller, "base:sql")) == expected[kind]
            assert (await house.models(caller)).count("sql") == 1
        assert (await house.ask("acme", "DELETE", "/v1/adapters/sql")).status_code == 200
        assert tokens_of(await house.complete("acme", "sql")) == expected["qv"], "its own is gone: the public one"
        assert tokens_of(await house.complete("rival", "sql")) == expected["regex"]
        assert (await house.ask("acme", "DELETE", "/v1/adapters/sql")).status_code == 404, "not its own"
        assert {"sql", "~rival/sql"} <= set(await house.models("operator"))
        assert (await house.ask("operator", "DELETE", "/v1/adapters/~rival/sql")).status_code == 200
        assert tokens_of(await house.complete("rival", "sql")) == expected["qv"]


async def test_names_of_resolvers_are_one_tenant_s_where_their_beginning_says_so(
    house: House, adapters: dict[str, Path]
) -> None:
    asked: list[str] = []

    class Folder:
        async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
            asked.append(lora_name)
            found = lora_name in ("acme-sql", "team/sql", "sql")
            return LoRARequest(lora_name, 1, str(adapters["qv"]), base_model_name=base_model_name) if found else None

    house.resolver, house.tenants = Folder(), {"acme": {"name_prefixes": ["acme-", "team/"]}}
    async with house.open():
        for name in ("acme-sql", "team/sql"):
            for again in range(2):  # also once it is resident
                never = error_of(await house.complete("rival", name.replace("sql", "x")), name.replace("sql", "x"))
                assert error_of(await house.complete("rival", name), name) == never, again
                assert asked.count(name) == again, "nobody looked for it"
                assert (await house.complete("acme", name)).status_code == 200
            assert name in await house.models("acme") and name not in await house.models("rival")
        assert (await house.complete("rival", "sql")).status_code == 200


async def test_a_tenant_has_the_server_read_only_what_is_its_own(house: House, adapters: dict[str, Path]) -> None:
    """The server sees folders and buckets of all tenants."""
    shared = house.folder / "acme-shared"
    shared.mkdir()
    (shared / "out").symlink_to(adapters["qv"].parent)
    house.tenants = {"acme": {"sources": [str(shared), "s3://bucket/acme"]}}
    async with house.open():
        for source in (
            str(adapters["qv"]),
            str(shared / "out" / adapters["qv"].name),
            f"{shared}/../{adapters['qv'].name}",
            str(house.folder / "catalogue"),
            "s3://bucket/acme/../rival/sql",
            "s3://bucket/acme-2/sql",
            "s3://bucket/rival/sql",
        ):
            for path, body in (
                ("/v1/adapters", {"name": "sql", "source": source}),
                ("/v1/load_lora_adapter", {"lora_name": "sql", "lora_path": source}),
            ):
                refused = await house.ask("acme", "POST", path, body)
                assert refused.status_code == 403 and "`sources`" in refused.json()["error"]["message"], source
        (shared / "sql").mkdir()
        for file in adapters["qv"].iterdir():
            (shared / "sql" / file.name).write_bytes(file.read_bytes())
        body = {"lora_name": "sql", "lora_path": str(shared / "sql")}
        assert (await house.ask("acme", "POST", "/v1/load_lora_adapter", body)).status_code == 200
        assert "sql" in await house.models("acme") and "sql" not in await house.models("public")
        assert (await house.ask("acme", "POST", "/v1/unload_lora_adapter", {"lora_name": "sql"})).status_code == 200


@pytest.mark.parametrize("path", ["/v1/adapters", "/v1/load_lora_adapter"])
async def test_a_link_that_is_swapped_once_its_place_was_checked_opens_nothing(
    house: House, adapters: dict[str, Path], path: str
) -> None:
    own = house.folder / "acme-shared" / "sql"
    shutil.copytree(adapters["qv"], own)
    house.tenants = {"acme": {"sources": [str(own.parent)]}}
    async with house.open():
        keys = house.tenancy.keys
        assert keys is not None
        place_of = keys.place_of

        def swapping(tenant: str, source: str) -> str | None:
            place = place_of(tenant, source)
            own.rename(own.with_name("aside"))
            own.symlink_to(adapters["all"])
            return place

        keys.place_of = swapping  # type: ignore[method-assign]
        name, source = ("name", "source") if path == "/v1/adapters" else ("lora_name", "lora_path")
        refused = await house.ask("acme", "POST", path, {name: "stolen", source: str(own)})
        assert refused.status_code == 409 and "symlink that leads out of" in refused.json()["error"]["message"]
        assert "stolen" not in await house.models("acme")


async def test_what_takes_from_all_tenants_or_is_another_s_needs_the_operator(
    house: House, adapters: dict[str, Path]
) -> None:
    async with house.open():
        assert (await house.push("acme", "sql", adapters["qv"])).status_code == 200
        assert (await house.ask("acme", "POST", "/v1/adapters/sql/pin", {})).status_code == 403
        assert (await house.push("acme", "sql", adapters["qv"], options='{"pin": 1}')).status_code == 403
        assert (await house.push("acme", "x", adapters["qv"], options='{"tenant": "rival"}')).status_code == 403
        assert (await house.push("operator", "x", adapters["qv"], options='{"tenant": "rival"}')).status_code == 200
        assert (await house.ask("operator", "POST", "/v1/adapters/~acme/sql/pin", {})).json()["pinned_replicas"] == 1
        assert [one["id"] for one in (await house.ask("rival", "GET", "/v1/adapters")).json()["data"]] == ["x"]
        listed = (await house.ask("operator", "GET", "/v1/adapters")).json()["data"]
        assert [(one["id"], one["tenant"]) for one in listed] == [("~acme/sql", "acme"), ("~rival/x", "rival")]
        assert (await house.ask("public", "GET", "/v1/adapters")).status_code == 403
        assert (await house.ask(None, "GET", "/v1/models")).status_code == 401


async def test_only_the_operator_has_a_replica_receive_from_elsewhere(house: House, adapters: dict[str, Path]) -> None:
    """A tenant's key, which may push tensors in a body, makes the replica neither connect nor open memory."""
    tensors = load_file(adapters["qv"] / "adapter_model.safetensors")
    config = json.loads((adapters["qv"] / "adapter_config.json").read_text())
    device, shared = shared_tensors(tensors)
    path = "/v1/adapters/elsewhere/tensors"
    async with house.open():
        with shared as fields:
            body = pack_shared(fields, config)
            refused = await house.ask("acme", "PUT", path, content=body, params={"device": device})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
            query = {"device": device, "options": json.dumps({"tenant": "acme"})}
            pushed = await house.ask("operator", "PUT", path, content=body, params=query)
            assert pushed.json()["id"] == "~acme/elsewhere", pushed.text
        place = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2}
        for caller in ("acme", "public"):
            assert (await house.ask(caller, "POST", "/init_weights_update_group", place)).status_code == 403
        assert "elsewhere" in await house.models("acme")
        assert "elsewhere" not in await house.models("rival")


async def test_a_tenant_downloads_its_own_adapters_only_and_the_operator_all(
    house: House, adapters: dict[str, Path]
) -> None:
    async with house.open():
        assert (await house.push("acme", "sql", adapters["qv"])).status_code == 200
        assert (await house.push("operator", "public", adapters["all"])).status_code == 200
        own = await house.ask("acme", "POST", "/v1/adapters/sql/download", {})
        assert (own.status_code, own.headers["x-lorafleet-version"]) == (200, "1")
        assert own.headers["x-lorafleet-digest"] == folder_digest(adapters["qv"])
        assert (await house.ask("operator", "POST", "/v1/adapters/~acme/sql/download", {})).content == own.content
        for caller, name, status in (
            ("rival", "sql", 404),
            ("rival", "public", 404),
            ("rival", "~acme/sql", 400),
            ("public", "public", 403),
            (None, "public", 401),
            ("operator", "public", 200),
        ):
            answer = await house.ask(caller, "POST", f"/v1/adapters/{name}/download", {})
            assert answer.status_code == status, (caller, name, answer.text[:200])


async def test_resolvers_look_for_a_name_to_download_for_the_operator_only(
    house: House, adapters: dict[str, Path]
) -> None:
    shelf = house.folder / "shelf"
    shutil.copytree(adapters["qv"], shelf / "cold")
    base = json.loads((adapters["qv"] / "adapter_config.json").read_text())["base_model_name_or_path"]
    house.resolver = FilesystemResolver(shelf, [base])
    async with house.open():
        path = "/v1/adapters/cold/download"
        assert (await house.ask("acme", "POST", path, {})).status_code == 404
        got = await house.ask("operator", "POST", path, {})
        assert got.status_code == 200 and "x-lorafleet-version" not in got.headers
        assert got.headers["x-lorafleet-digest"] == folder_digest(adapters["qv"])
        refused = await house.ask("operator", "POST", path, {"version": 1})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "version")
        assert (await house.ask("acme", "POST", path, {})).status_code == 404, "found, but not its own"


async def test_downloads_of_one_tenant_at_a_time_are_bounded(house: House, adapters: dict[str, Path]) -> None:
    async with house.open():
        for caller in ("acme", "rival"):
            assert (await house.push(caller, "sql", adapters["qv"])).status_code == 200
        acme = Caller(tenant="acme")
        running = [house.front.work_bounds.enter("downloads", MAX_DOWNLOADS, acme) for _ in range(MAX_DOWNLOADS)]
        refused = await house.ask("acme", "POST", "/v1/adapters/sql/download", {})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert (await house.ask("rival", "POST", "/v1/adapters/sql/download", {})).status_code == 200
        running[0].end()
        for _ in range(2):
            assert (await house.ask("acme", "POST", "/v1/adapters/sql/download", {})).status_code == 200


async def test_what_a_tenant_may_store_is_bounded(house: House, adapters: dict[str, Path]) -> None:
    house.tenants = {
        "acme": {"limits": {"adapters": 1}, "sources": [str(adapters["qv"].parent)]},
        "rival": {"limits": {"adapter_bytes": 1}},
    }
    async with house.open():
        assert (await house.push("acme", "one", adapters["qv"])).status_code == 200
        assert (await house.push("acme", "one", adapters["all"])).status_code == 200, "a version is no other adapter"
        before = set((house.folder / "catalogue" / "adapters").iterdir())
        refused = await house.push("acme", "two", adapters["regex"])
        assert refused.status_code == 429 and "2 adapters; its limit is 1" in refused.json()["error"]["message"]
        loaded = {"lora_name": "two", "lora_path": str(adapters["regex"])}
        assert (await house.ask("acme", "POST", "/v1/load_lora_adapter", loaded)).status_code == 429
        config = json.loads((adapters["regex"] / "adapter_config.json").read_text())
        weights = (adapters["regex"] / "adapter_model.safetensors").read_bytes()
        copies = [base64.b64encode(weights).decode()]
        body = {"lora_name": "two", "config_dict": config, "serialized_named_tensors": copies}
        refused = await house.ask("acme", "POST", "/load_lora_adapter_from_tensors", body)
        assert refused.status_code == 429, refused.text
        device, shared = shared_tensors(load_file(adapters["regex"] / "adapter_model.safetensors"))
        query = {"device": device, "options": json.dumps({"tenant": "acme"})}
        with shared as fields:
            content = pack_shared(fields, config)
            refused = await house.ask("operator", "PUT", "/v1/adapters/two/tensors", content=content, params=query)
        assert refused.status_code == 429, refused.text
        refused = await house.push("rival", "one", adapters["regex"])
        assert refused.status_code == 429 and "its limit is 1." in refused.json()["error"]["message"]
        assert set((house.folder / "catalogue" / "adapters").iterdir()) == before, "and nothing of it stays"
        assert (await house.ask("acme", "DELETE", "/v1/adapters/one")).status_code == 200
        assert (await house.push("acme", "two", adapters["regex"])).status_code == 200
    async with house.open():  # of the catalogue that is on disk
        assert (await house.push("acme", "three", adapters["qv"])).status_code == 429


async def test_whatever_two_tenants_do_nobody_is_answered_with_another_s_adapter(
    house: House, adapters: dict[str, Path]
) -> None:
    rng, names = random.Random(7), ("a", "b")
    held: dict[str, dict[str, str]] = {"acme": {}, "rival": {}, "operator": {}}  # caller -> name -> kind

    def seen(caller: str, name: str) -> str | None:
        return held.get(caller, {}).get(name) or held["operator"].get(name)

    async with house.open():
        expected = await answers(house, adapters)
        for _ in range(30):
            caller, name = rng.choice(("acme", "rival", "operator")), rng.choice(names)
            match rng.choice(("push", "push", "remove", "ask", "ask", "ask", "list")):
                case "push":
                    kind = rng.choice(KINDS)
                    assert (await house.push(caller, name, adapters[kind])).status_code == 200
                    held[caller][name] = kind
                case "remove":
                    status = (await house.ask(caller, "DELETE", f"/v1/adapters/{name}")).status_code
                    assert status == (200 if held[caller].pop(name, None) else 404)
                case "ask":
                    for asker in ("acme", "rival", "public"):
                        answer = await house.complete(asker, rng.choice((name, f"base:{name}")))
                        kind = seen(asker, name)
                        if kind is None:
                            assert answer.status_code == 404
                        else:
                            assert tokens_of(answer) == expected[kind], (asker, name)
                case "list":
                    for asker in ("acme", "rival", "public"):
                        shown = {one for one in await house.models(asker) if one in names}
                        assert shown == {name for name in names if seen(asker, name)}


async def test_no_tenant_finds_what_another_s_prompts_left_in_the_prefix_cache(
    house: House, adapters: dict[str, Path]
) -> None:
    """Neither of the base nor of an adapter that both have, byte for byte."""

    prompt = list(range(60, 100))  # of no other test

    async def num_cached(caller: str, model: str, **fields: str) -> int:
        answer = (await house.complete(caller, model, prompt=prompt, **fields)).json()
        cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached

    async with house.open():
        for caller in ("acme", "rival"):
            assert (await house.push(caller, "sql", adapters["qv"])).status_code == 200
        for model in ("base", "sql"):
            for caller in ("acme", "rival"):
                assert await num_cached(caller, model) == 0, (caller, model)
                assert await num_cached(caller, model) > 0
                assert await num_cached(caller, model, cache_salt="a") == 0
                assert await num_cached(caller, model, cache_salt="b") == 0
                assert await num_cached(caller, model, cache_salt="a") > 0
        assert await num_cached("public", "base") == 0
        assert (await house.complete("acme", "base", cache_salt="")).status_code == 400


async def test_a_tenant_does_not_hear_where_the_catalogue_lies_and_the_operator_does(
    house: House, adapters: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    async with house.open():
        place = house.folder / "catalogue"
        (place / "aside").rename(place / "gone")
        try:
            for caller in ("acme", "operator"):
                failed = await house.push(caller, "sql", adapters["qv"])
                assert (failed.status_code, failed.json()["error"]["code"]) == (503, "store_error")
                assert (str(place) in failed.json()["error"]["message"]) == (caller == "operator")
        finally:
            (place / "gone").rename(place / "aside")
        assert str(place) in caplog.text


@pytest.mark.parametrize("path", ["/nowhere/\udcff", "/nowhere/\x00", "/nowhere/\xff"])
@pytest.mark.parametrize("route", ["/v1/adapters", "/v1/load_lora_adapter"])
async def test_a_path_that_no_file_can_have_is_refused_by_the_route_and_breaks_nothing(
    house: House, path: str, route: str
) -> None:
    name, source = ("name", "source") if route == "/v1/adapters" else ("lora_name", "lora_path")
    body = f'{{"{name}": "odd", "{source}": {json.dumps(path)}}}'  # with escapes, which are no UTF-8
    async with house.open():
        for caller in ("acme", "operator"):
            refused = await house.http.post(
                route,
                content=body,
                headers={"authorization": f"Bearer {house.keys[caller]}", "content-type": "application/json"},
            )
            assert refused.status_code in (400, 403, 404), refused.text
            assert refused.json()["error"]["message"]
        assert (await house.complete("acme", "base")).status_code == 200


async def test_a_folder_whose_name_is_no_text_fails_the_request_for_it_alone(
    house: House, adapters: dict[str, Path]
) -> None:
    shelf = house.folder / "shelf"
    shelf.mkdir()
    shutil.copytree(adapters["qv"], shelf / os.fsdecode(b"odd\xff"))
    shutil.copytree(adapters["qv"], shelf / "good")
    (shelf / "linked").symlink_to(os.fsdecode(b"odd\xff"))
    house.resolver = FilesystemResolver(
        shelf, [json.loads((adapters["qv"] / "adapter_config.json").read_text())["base_model_name_or_path"]]
    )
    async with house.open():
        for name, statuses in (("odd\xff", (400, 404)), ("linked", (400,)), ("good", (200,))):
            answer = await house.complete("public", name)
            assert answer.status_code in statuses, answer.text
        listed = await house.ask("operator", "GET", "/v1/models")
        assert listed.status_code == 200 and listed.json()["data"]


async def test_all_files_of_all_versions_count_as_bytes_of_a_tenant(
    house: House, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """A draft, a tokenizer file and each version that is kept, as they are on the disk."""
    full, folder = tmp_path / "full", house.folder / "catalogue" / "adapters"
    shutil.copytree(adapters["qv"], full)
    (full / "draft").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(adapters["all"] / name, full / "draft" / name)
    (full / "chat_template.jinja").write_text("x" * 100_000)
    plain = sum((adapters["qv"] / name).stat().st_size for name in ("adapter_config.json", "adapter_model.safetensors"))
    house.tenants = {"acme": {"limits": {"adapter_bytes": plain}, "sources": [str(tmp_path)]}}
    async with house.open():
        for body in (pack_folder(full), pack_folder(adapters["regex"]) + pack_folder(full)):
            refused = await house.ask("acme", "PUT", "/v1/adapters/one/files", content=body)
            assert refused.status_code == 429 and "with all files of all versions" in refused.text
        refused = await house.ask("acme", "POST", "/v1/adapters", {"name": "one", "source": str(full)})
        assert refused.status_code == 429 and f"its limit is {plain}" in refused.text
        assert not folder.exists() or not list(folder.iterdir()), "nothing of it was stored"
        pushed = await house.push("acme", "one", adapters["qv"])
        assert pushed.status_code == 200, pushed.text
        [version] = pushed.json()["versions"]
        assert version["stored_bytes"] == plain == sum(path.stat().st_size for path in folder.rglob("*.*"))
        assert (await house.push("acme", "one", adapters["qv"])).status_code == 200, "the same bytes count once"
        refused = await house.push("acme", "one", adapters["layers"])
        assert refused.status_code == 429, "the version before is still kept"


async def test_an_upload_that_can_never_be_stored_is_not_read(house: House) -> None:
    house.tenants = {"acme": {"limits": {"adapter_bytes": 1000}}}

    async def never() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    async with house.open():
        for declared, status in ((MAX_TAR_BYTES + 1001, 429), (MAX_UPLOAD_BYTES + 1, 413)):
            headers = {"authorization": f"Bearer {house.keys['acme']}", "content-length": str(declared)}
            refused = await house.http.put("/v1/adapters/one/files", content=never(), headers=headers)
            assert refused.status_code == status, refused.text

        async def endless() -> AsyncIterator[bytes]:
            while True:
                yield bytes(1 << 20)

        headers = {"authorization": f"Bearer {house.keys['acme']}"}
        refused = await house.http.put("/v1/adapters/one/files", content=endless(), headers=headers)
        assert refused.status_code == 429 and "its limit is 1000" in refused.text


async def test_the_next_tenant_of_a_name_gets_nothing_of_the_former(house: House, adapters: dict[str, Path]) -> None:
    async with house.open():
        assert (await house.push("acme", "sql", adapters["all"])).status_code == 200
        former = tokens_of(await house.complete("acme", "sql"))
    house.tenants = {"acme": {"holder": 2}}
    async with house.open():
        assert await house.models("acme") == ["base"]
        for method, path, body in asked_for("sql"):
            unknown = json.loads(json.dumps(body).replace("sql", "lqs"))
            answer = await house.ask("acme", method, path, body)
            assert error_of(answer, "sql") == error_of(
                await house.ask("acme", method, path.replace("sql", "lqs"), unknown), "lqs"
            )
        assert (await house.push("acme", "sql", adapters["qv"])).status_code == 200
        body = {"name": "more", "source": str(adapters["regex"]), "tenant": "acme"}
        pushed = await house.ask("operator", "POST", "/v1/adapters", body)
        assert pushed.status_code == 200, pushed.text
        assert tokens_of(await house.complete("acme", "sql")) != former
        assert await house.models("acme") == ["base", "more", "sql"]
        assert {"~acme/sql", "~acme@2/more", "~acme@2/sql"} < set(await house.models("operator"))
        page = (await house.ask("acme", "GET", "/v1/adapters")).json()
        assert [adapter["id"] for adapter in page["data"]] == ["more", "sql"]
    sums = summed(house.folder / "usage", ["tenant", "adapter"])
    assert sums["acme", "~acme/sql"].sequences == 1 and sums["acme@2", "~acme@2/sql"].sequences == 1
    [*_, last] = [
        json.loads(line) for path in (house.folder / "audit").iterdir() for line in path.read_text().splitlines()
    ]
    assert last["key_mark"]
