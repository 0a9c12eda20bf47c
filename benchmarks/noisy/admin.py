"""Attacks with administrative calls, which a tenant's admin key may make as often as it likes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import quote

import httpx

from noisy.hostile import Attack, Call, Hostile, post
from noisy.pushing import good_files, pushed, removed, tar_of


async def alias_storm(hostile: Hostile) -> None:
    """Creates ever new aliases of one adapter, moves them and moves them back."""
    name = await pushed(hostile, good_files(hostile))

    async def once() -> None:
        alias = hostile.new_name()
        await hostile.send(post(f"/v1/adapters/{name}/alias", {"alias": alias, "version": 1}))
        await hostile.send(post(f"/v1/adapters/{name}/alias", {"alias": alias, "split": {"1": 1.0}}))
        await hostile.send(post(f"/v1/adapters/{name}/rollback", {"alias": alias}))

    await hostile.repeated(once)


async def version_storm(hostile: Hostile) -> None:
    """Pushes version after version of one adapter, each of which becomes active at once."""
    name = hostile.new_name()

    async def once() -> None:
        await hostile.send(Call("PUT", f"/v1/adapters/{name}/files", tar_of(good_files(hostile))))
        await hostile.send(hostile.completion(model=name, max_tokens=1))

    await hostile.repeated(once, 4)


async def large_metadata(hostile: Hostile) -> None:
    """Pushes metadata of 1 kB to a megabyte, and sources of the same length."""
    packed = tar_of(good_files(hostile))

    def calls() -> Iterator[Call]:
        for number in itertools.count():
            size = (1_000, 6_000, 20_000)[number % 3]
            options = quote(json.dumps({"metadata": {f"k{i}": "v" * 10 for i in range(size // 20)}}))
            yield Call("PUT", f"/v1/adapters/{hostile.tag}-meta/files?options={options}&source={'s' * 1000}", packed)
            metadata = {f"k{i}": "v" * 100 for i in range(10_000)}
            body = {"name": hostile.new_name(), "source": str(hostile.target.sources_dir / "good")}
            yield post("/v1/adapters", body | {"metadata": metadata})

    await hostile.flood_with(calls(), width=4)


async def lists(hostile: Hostile) -> None:
    """Lists models and adapters, and reads the page of one adapter, as fast as the server answers."""
    paths = ("/v1/models", "/v1/adapters?limit=1000", "/v1/adapters", "/v1/models/pirate", "/v1/adapters/shout")
    await hostile.flood(*(Call("GET", path) for path in paths), width=16)


async def console_and_documents(hostile: Hostile) -> None:
    """Reads the console's state, the API document and the metrics as fast as the server answers."""
    paths = ("/v1/console/state", "/openapi.json", "/docs", "/metrics", "/console/", "/v1/quality")
    await hostile.flood(*(Call("GET", path) for path in paths), width=16)


async def prefetch_and_verify(hostile: Hostile) -> None:
    """Prefetches an adapter and verifies its digests, over and over."""
    paths = [f"/v1/adapters/{hostile.model}/{verb}" for verb in ("prefetch", "verify", "prefetch", "pin")]
    await hostile.flood(*(post(path, {}) for path in paths), width=16)


async def refused_administration(hostile: Hostile) -> None:
    """Makes calls that are rejected and audited: other tenants' adapters, odd names, wrong bodies."""
    odd = ("~quiet/pirate", "..%2f..%2fetc", "a" * 5_000, "%00", "pirate%2fshout")
    calls = [Call("DELETE", f"/v1/adapters/{name}") for name in odd]
    calls += [post(f"/v1/adapters/{name}/alias", {"version": 10**30}) for name in odd]
    calls += [post("/v1/adapters", {"name": name, "source": "/etc", "tenant": "quiet"}) for name in odd]
    await hostile.flood(*calls, width=16)


async def removals(hostile: Hostile) -> None:
    """Removes adapters while their streams are running."""

    async def once() -> None:
        name = await pushed(hostile, good_files(hostile))
        call = hostile.completion(model=name, stream=True, max_tokens=100)
        assert isinstance(call.content, bytes)
        headers = hostile.headers(call)
        stream = hostile.http.stream(call.method, call.path, content=call.content, headers=headers)
        with suppress(httpx.HTTPError):
            async with stream as answer:
                hostile.seen[str(answer.status_code)] += 1
                await removed(hostile, name)

    await hostile.repeated(once)


ATTACKS: tuple[Attack, ...] = (
    *(alias_storm, version_storm, large_metadata, lists, console_and_documents, prefetch_and_verify),
    *(refused_administration, removals),
)
