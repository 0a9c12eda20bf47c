"""The store in S3, against a real server: conditions hold between writers, files are complete or absent."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lorafleet.cluster.catalogue.catalogue_log import CatalogueLog, Fenced
from lorafleet.cluster.catalogue.catalogue_records import AdapterRecord, Entry, VersionRecord
from lorafleet.cluster.catalogue.packed import unpack
from lorafleet.cluster.catalogue.s3_store import S3Store
from lorafleet.protocol.adapter_formats.adapter_files import folder_digest
from lorafleet.protocol.errors import AdapterMissing, StoreError
from s3_server import BUCKET, RadosGateway, why_not, write_credentials

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RadosGateway]:
    gateway = RadosGateway(tmp_path_factory.mktemp("s3"))
    yield gateway
    gateway.stop()


@pytest.fixture
def store(gateway: RadosGateway, request: pytest.FixtureRequest) -> S3Store:
    return S3Store(f"s3://{BUCKET}/{request.node.name}", lambda: gateway.client)


def test_a_key_is_created_once(store: S3Store) -> None:
    assert store.create("log/1", b"first")
    assert not store.create("log/1", b"second")
    assert store.read("log/1") == b"first"
    assert store.read("log/2") is None
    assert store.keys("log/") == ["log/1"]
    store.delete("log/1")
    assert store.create("log/1", b"third")


def test_of_many_writers_at_once_one_gets_the_key(store: S3Store) -> None:
    won: list[int] = []

    def write(number: int) -> None:
        if store.create("log/1", str(number).encode()):
            won.append(number)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert store.read("log/1") == str(won[0]).encode()


def loaded(log: CatalogueLog) -> dict[str, Entry]:
    return {name: unpack(one) for name, one in log.load().items()}


def test_two_logs_in_one_place_lose_no_update(store: S3Store) -> None:
    def count_up() -> None:
        log = CatalogueLog(store)
        entries = loaded(log)
        for _ in range(10):
            while True:
                present = entries.get("shared")
                number = present.versions[0].number + 1 if isinstance(present, AdapterRecord) else 1
                mine = AdapterRecord("shared", (VersionRecord(number, "d", "here", 8, 1, 0.0),))
                try:
                    others = log.append(mine)
                except Fenced:
                    entries = loaded(log)
                    continue
                entries |= {entry.name: entry for entry in others or [mine]}
                if not others:
                    break

    threads = [threading.Thread(target=count_up) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [shared] = loaded(CatalogueLog(store)).values()
    assert isinstance(shared, AdapterRecord) and shared.versions[0].number == 30


def test_files_are_complete_or_absent(store: S3Store, tmp_path: Path) -> None:
    folder, back = tmp_path / "adapter", tmp_path / "back"
    folder.mkdir()
    back.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(bytes(20 << 20))  # in parts
    (folder / "draft").mkdir()
    (folder / "draft" / "adapter_config.json").write_text("{}")
    (folder / "draft" / "adapter_model.safetensors").write_bytes(b"for the draft model")
    digest = folder_digest(folder)
    store.put_files(digest, folder)
    assert store.files_bytes(digest) == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    store.fetch_files(digest, back)
    assert folder_digest(back) == digest
    assert (back / "draft" / "adapter_model.safetensors").read_bytes() == b"for the draft model"
    store.delete_files(digest)
    assert not store.has_files(digest)
    with pytest.raises(AdapterMissing):
        store.fetch_files(digest, back)
    (folder / "adapter_config.json").unlink()
    store.put_files("half", folder)  # a writer that died before the config
    assert not store.has_files("half")


def test_a_store_that_does_not_answer_is_an_error_and_recovers(store: S3Store, gateway: RadosGateway) -> None:
    log = CatalogueLog(store)
    log.load()
    assert log.append(AdapterRecord("a")) == []
    gateway.kill()
    with pytest.raises(StoreError, match="cannot be written"):
        log.append(AdapterRecord("b"))
    gateway.restart()
    log.append(AdapterRecord("b"))
    assert set(CatalogueLog(store).load()) == {"a", "b"}


def test_credentials_that_expire_are_named_and_new_ones_need_no_restart(
    gateway: RadosGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    credentials = tmp_path / "credentials"
    write_credentials(credentials, *gateway.session(8))
    ends = time.monotonic() + 9
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", gateway.endpoint)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    store = S3Store(f"s3://{BUCKET}/expiring")
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    log = CatalogueLog(store)
    log.load()
    assert log.append(AdapterRecord("before")) == []
    time.sleep(ends - time.monotonic())
    with pytest.raises(StoreError, match=r"refuses this cluster's credentials.*AccessDenied"):
        log.append(AdapterRecord("lost"))
    with pytest.raises(StoreError, match=r"refuses this cluster's credentials.*AccessDenied"):
        store.put_files("d", folder)
    credentials.write_text("")
    with pytest.raises(StoreError, match=r"refuses this cluster's credentials.*Unable to locate credentials"):
        store.has_files("d")
    write_credentials(credentials, *gateway.session(600))
    store.put_files("d", folder)
    assert store.has_files("d")
    assert log.append(AdapterRecord("after")) == []
    assert set(CatalogueLog(store).load()) == {"before", "after"}
