"""Pushes copy files for minutes: whose turn it is, and what a full disk does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from lorafleet.api.access.body_budget import BodyBudget
from lorafleet.cluster.admin.administration import Administration
from lorafleet.cluster.admin.push_intake import PushIntake
from lorafleet.cluster.admin.pushing import PUSHES, AdapterAdmin
from lorafleet.cluster.catalogue.catalogue import Catalogue
from lorafleet.cluster.catalogue.catalogue_records import AdapterRecord, VersionRecord
from lorafleet.cluster.catalogue.folder_store import FolderStore
from lorafleet.cluster.directory.directory import AdapterDirectory
from lorafleet.cluster.receiving.group_orders import GroupPush
from lorafleet.cluster.receiving.update_groups import UpdateGroups
from lorafleet.protocol.adapter_formats.adapter_files import folder_digest
from lorafleet.protocol.adapter_formats.announced_tensors import AnnouncedPush, read_announced
from lorafleet.protocol.adapter_formats.tensor_push import PushedTensors
from lorafleet.protocol.admin_verbs import PreloadAdapter, PushTerms, RegisterAdapter, Verb
from lorafleet.protocol.errors import AdapterMissing, BodyTimeout, QueueFull, StoreRefused
from lorafleet.protocol.names import full_name
from lorafleet.protocol.sources import SourcesConfig
from lorafleet.resolvers.store import AdapterStore


class SlowSource(AdapterStore):
    """What is pushed from "/slow" does not arrive before release(). All else is opened at once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(SourcesConfig())
        self._folder = folder
        self._released = threading.Event()
        self.release = self._released.set

    @contextmanager
    def open(self, uri: str, digest: str = "") -> Iterator[Path]:
        assert not digest, "a push reads what is there now"
        if uri == "/slow":
            self._released.wait()
        yield self._folder


async def administered(verb: Verb[Any]) -> Any:
    assert isinstance(verb, RegisterAdapter)
    return verb.name


@pytest.fixture
def source(tmp_path: Path) -> Iterator[SlowSource]:
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).write_bytes(b"{}")
    made = SlowSource(folder)
    yield made
    made.release()


@pytest.fixture
def admin(source: SlowSource, tmp_path: Path) -> Iterator[AdapterAdmin]:
    made = AdapterAdmin(administered, FolderStore(tmp_path / "store"), ["base"], "run", source)
    yield made
    made.close()


async def test_one_tenant_s_slow_pushes_keep_neither_another_s_nor_other_work_waiting(
    admin: AdapterAdmin, source: SlowSource
) -> None:
    loud = [
        asyncio.create_task(admin.push_folder(full_name("loud", f"a{number}"), "/slow", PushTerms("/slow")))
        for number in range(PUSHES.running_of_one + PUSHES.waiting + 2)
    ]
    quiet: object = await admin.push_folder(full_name("quiet", "a"), "/fast", PushTerms("/fast"))
    assert quiet == full_name("quiet", "a")
    assert await asyncio.to_thread(lambda: "the replica's own threads are free")
    refused = [one for one in loud if one.done()]
    assert len(refused) == 2 and all(isinstance(one.exception(), QueueFull) for one in refused)
    source.release()
    done = await asyncio.gather(*loud, return_exceptions=True)
    assert sum(isinstance(one, str) for one in done) == len(loud) - 2


async def test_a_full_temporary_folder_refuses_the_push_and_says_so(
    admin: AdapterAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lorafleet.cluster.admin.pushing.stage", fail)
    with pytest.raises(StoreRefused, match="temporary folder: No space left"):
        await admin.push_folder("a", "/fast", PushTerms("/fast"))


class SlowStore(FolderStore):
    """Files with the digest `slow` do not arrive before `released` is set."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.slow = ""
        self.released = threading.Event()

    def fetch_files(self, digest: str, target: Path) -> None:
        if digest == self.slow:
            self.released.wait()
        super().fetch_files(digest, target)


async def test_one_tenant_s_verifications_keep_nobody_else_waiting(tmp_path: Path) -> None:
    store = SlowStore(tmp_path / "store")
    catalogue = Catalogue(store)
    directory = AdapterDirectory(catalogue)
    await directory.load()
    for tenant in ("loud", "quiet"):
        folder = tmp_path / tenant
        folder.mkdir()
        for file_name in ("adapter_config.json", "adapter_model.safetensors"):
            (folder / file_name).write_text(tenant)
        digest = folder_digest(folder)
        store.put_files(digest, folder)
        name = full_name(tenant, "a")
        made = AdapterRecord(name, (VersionRecord(1, digest, "upload", 8, 10, 1.0),), tenant=tenant)
        await catalogue.change(name, lambda _, made=made: made)
        if tenant == "loud":
            store.slow = digest
    admin = Administration(directory, ["base"])
    try:
        loud = [asyncio.create_task(admin.verify(full_name("loud", "a"))) for _ in range(8)]
        assert [version.number for version in await admin.verify(full_name("quiet", "a"))] == [1]
        assert not any(task.done() for task in loud)
    finally:
        store.released.set()
    await asyncio.gather(*loud)


async def test_files_that_a_removal_deletes_during_a_push_are_put_once_more(tmp_path: Path, source: SlowSource) -> None:
    store = FolderStore(tmp_path / "store")
    asked: list[str] = []

    async def removing(verb: Verb[Any]) -> Any:
        if isinstance(verb, PreloadAdapter):
            return None
        assert isinstance(verb, RegisterAdapter)
        asked.append(verb.digest)
        if len(asked) == 1:
            store.delete_files(verb.digest)
            raise AdapterMissing("the catalogue has no files with this digest.")
        assert store.has_files(verb.digest)
        return verb.name

    admin = AdapterAdmin(removing, store, [], "app", source)
    tensors = PushedTensors(b"{}", memoryview(save({"weights": torch.ones(2)})))
    digest, _ = await admin.push_tensors("policy", lambda: tensors, PushTerms("memory"))
    assert asked == [digest, digest]
    admin.close()


class OneGroup(UpdateGroups):
    """A group whose pushes wait until `go` is set."""

    def __init__(self) -> None:
        super().__init__((), "cpu")
        self.begun, self.go = asyncio.Event(), asyncio.Event()

    def has(self, name: str) -> bool:
        return name == "g"

    async def receive(self, name: str, push: AnnouncedPush, intake: PushIntake, timeout_s: float) -> None:  # noqa: ARG002
        self.begun.set()
        await self.go.wait()
        raise BodyTimeout("nothing came")


async def test_pushes_of_a_group_count_at_its_member_whichever_replica_has_their_requests(admin: AdapterAdmin) -> None:
    admin.receivers.groups = groups = OneGroup()
    admin.tensor_budget = BodyBudget(400)
    file = read_announced([{"name": "a", "dtype": "float32", "shape": [10]}])
    assert 100 < file.num_bytes < 200
    order = GroupPush("g", "policy", AnnouncedPush(b"{}", file), PushTerms("distributed"), 60.0)
    first = asyncio.create_task(admin.obey_group_order(order))
    await groups.begun.wait()
    with pytest.raises(QueueFull, match="process group 'g'"):
        await admin.obey_group_order(order)
    groups.go.set()
    with pytest.raises(BodyTimeout):
        await first
    with pytest.raises(BodyTimeout):
        await admin.obey_group_order(order)
