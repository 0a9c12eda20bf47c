"""The files of a download are found by any public name, and copied by the handle of the directory's actor."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, TypeVar

import pytest

from lorafleet.cluster.admin.admin_handle import DirectoryHandle
from lorafleet.cluster.catalogue.catalogue_records import Share
from lorafleet.protocol.adapter_formats.adapter_files import folder_digest
from lorafleet.protocol.admin_verbs import LocateAdapter, Located, Verb
from lorafleet.protocol.errors import AdapterChanged, InvalidRequest, ModelNotFound
from lorafleet.protocol.lora_request import LoRARequest
from tests.cluster.admin import test_administration
from tests.cluster.admin.test_administration import Cluster
from tests.cluster.directory.conftest import Engine

make, cluster = test_administration.make, test_administration.cluster

AnswerT = TypeVar("AnswerT")


class NearHandle(DirectoryHandle):
    """A handle to an administration in this process, whose event loop runs in another thread."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(None)
        self._cluster = cluster
        self._loop = asyncio.get_running_loop()

    def _call(self, verb: Verb[AnswerT]) -> AnswerT:
        return asyncio.run_coroutine_threadsafe(self._cluster.admin.carry_out(verb), self._loop).result()


async def locate(cluster: Cluster, name: str, version: int | None = None) -> Located:
    return await cluster.admin.carry_out(LocateAdapter(name, version))


async def test_a_name_an_alias_and_a_version_lead_to_the_files(cluster: Cluster, make: Any) -> None:
    async with cluster.replicas(Engine()):
        for bytes_of in ("x", "y"):
            adapter = await cluster.push("sql", make(bytes_of))
        digests = [version.digest for version in adapter.versions]
        await cluster.admin.alias("sql", [Share(1, 1.0)], "old")
        for name, version, number in (("sql", None, 2), ("sql", 1, 1), ("old", None, 1), ("old", 2, 2)):
            found = await locate(cluster, name, version)
            assert (found.version, found.lora.digest) == (number, digests[number - 1])
            assert folder_digest(Path(found.lora.lora_path)) == found.lora.digest
        with pytest.raises(InvalidRequest, match="no version 3; it has 1, 2"):
            await locate(cluster, "sql", 3)
        await cluster.admin.alias("sql", [Share(1, 9.0), Share(2, 1.0)])
        with pytest.raises(InvalidRequest, match=r"version 1 \(90%\), version 2 \(10%\); say in `version`"):
            await locate(cluster, "sql")
        await cluster.admin.remove("sql")
        with pytest.raises(ModelNotFound, match="no adapter `sql`"):
            await locate(cluster, "sql")


async def test_what_a_resolver_found_has_no_versions(cluster: Cluster) -> None:
    lora = LoRARequest("cold", 1, "s3://bucket/cold", "0" * 64)
    cluster.directory.names.found.by_name["cold"] = lora
    found = await locate(cluster, "cold")
    assert (found.lora, found.version) == (lora, None)
    with pytest.raises(InvalidRequest, match="found by a resolver, so it has no versions"):
        await locate(cluster, "cold", 1)
    with pytest.raises(InvalidRequest, match=r"AdminClient\.download"):
        await asyncio.to_thread(NearHandle(cluster).download, "cold", "anywhere")


async def test_the_handle_copies_the_files_that_were_registered(cluster: Cluster, make: Any, tmp_path: Path) -> None:
    handle = NearHandle(cluster)
    async with cluster.replicas(Engine()):
        [version] = (await cluster.push("sql", make("x"))).versions
        target = tmp_path / "got" / "sql"
        got = await asyncio.to_thread(handle.download, "sql", str(target))
        assert (got.version, got.digest, got.folder) == (1, version.digest, str(target))
        assert folder_digest(target) == version.digest
        with pytest.raises(FileExistsError):
            await asyncio.to_thread(handle.download, "sql", str(target))
        weights = cluster.folder / "adapters" / version.digest / "adapter_model.safetensors"
        weights.write_bytes(b"other")
        with pytest.raises(AdapterChanged, match="its files now have digest"):
            await asyncio.to_thread(handle.download, "sql", str(tmp_path / "changed"))
    assert not (tmp_path / "changed").exists()
