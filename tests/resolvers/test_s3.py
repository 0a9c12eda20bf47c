"""The S3 source over a real server that is killed, slowed down, cut off and lied to."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fetching import die_fetching, fetch_elsewhere, make_store
from lorafleet.protocol.errors import (
    AdapterChanged,
    AdapterMalformed,
    AdapterMissing,
    AdapterTooLarge,
    AdapterUnavailable,
    InvalidRequest,
)
from lorafleet.protocol.sources import S3Config
from lorafleet.resolvers import download
from lorafleet.resolvers.deadline import FetchDeadline
from lorafleet.resolvers.remote import RemoteResolver
from lorafleet.resolvers.s3 import S3Source, split
from lorafleet.resolvers.source import RemoteFile
from lorafleet.resolvers.store import AdapterStore
from s3_server import BUCKET, KEY, SECRET, RadosGateway, write_credentials
from tcp_proxy import TCPProxy

Make = Callable[..., dict[str, bytes]]
Read = Callable[[Path], dict[str, bytes]]
WEIGHTS = "adapter_model.safetensors"
LARGE = 20_000_000  # three parts


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file with them; nothing of the machine's own is used."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    file = tmp_path / "credentials"
    write_credentials(file, KEY, SECRET)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return file


@pytest.fixture
def proxy(gateway: RadosGateway) -> Iterator[TCPProxy]:
    made = TCPProxy(gateway.port)
    yield made
    made.close()


@pytest.fixture
def folder(gateway: RadosGateway, request: pytest.FixtureRequest) -> Callable[[dict[str, bytes]], str]:
    """Puts an adapter's files into a folder of the test's own: its URI."""

    def put(files: dict[str, bytes], name: str = "a") -> str:
        prefix = f"{request.node.name.partition('[')[0]}/{name}"
        for file, data in files.items():
            gateway.put(f"{prefix}/{file}", data)
        return f"s3://{BUCKET}/{prefix}"

    return put


def outcomes(store: AdapterStore) -> dict[str, float]:
    return {
        sample.labels["outcome"]: sample.value
        for metric in store.metrics.collect()
        for sample in metric.samples
        if sample.name == "lorafleet_adapter_fetches_total" and sample.value
    }


def nothing_is_left_of_it(cache: Path) -> bool:
    return not any(any((cache / part).iterdir()) for part in ("adapters", "drafts", "locks"))


def test_an_adapter_is_fetched_once_and_then_read_from_disk(
    proxy: TCPProxy, folder: Any, make_files: Make, read_files: Read, tmp_path: Path
) -> None:
    files = make_files(1, LARGE)
    uri = folder(files | {"optimizer.pt": bytes(100)})
    store = make_store(tmp_path / "c", proxy.endpoint)
    with store.open(uri) as found:
        assert read_files(found) == files
    assert LARGE < proxy.num_bytes < LARGE + 100_000
    assert store.fetch(uri) == found.name
    assert proxy.num_bytes < LARGE + 100_000
    assert outcomes(store) == {"fetched": 1, "cached": 1}
    proxy.close()
    with store.open(uri, digest=found.name) as again:  # by digest: nobody is asked
        assert read_files(again) == files


def test_a_new_version_under_the_same_uri_is_another_adapter(
    gateway: RadosGateway, folder: Any, make_files: Make, tmp_path: Path
) -> None:
    store = make_store(tmp_path / "c", gateway.endpoint)
    first = store.fetch(folder(make_files(1)))
    uri = folder(make_files(2))
    assert store.fetch(uri) != first
    assert store.fetch(uri, digest=first) == first  # still here
    elsewhere = make_store(tmp_path / "d", gateway.endpoint)
    with pytest.raises(AdapterChanged, match="no longer holds"):
        elsewhere.fetch(uri, digest=first)


def test_a_draft_lora_comes_along_and_counts(
    gateway: RadosGateway, folder: Any, make_files: Make, read_files: Read, tmp_path: Path
) -> None:
    draft = {f"draft/{name}": content for name, content in make_files(7).items()}
    uri = folder(make_files() | draft | {"draft/optimizer.pt": bytes(100)})
    store = make_store(tmp_path / "c", gateway.endpoint)
    first = store.fetch(uri)
    with store.open(uri, first) as found:
        assert read_files(found) == make_files() | draft
    assert store.fetch(folder(make_files(), name="without")) != first
    folder({f"draft/{WEIGHTS}": b"other"})
    assert store.fetch(uri) != first
    half = make_files() | {"draft/adapter_config.json": b"{}"}
    with pytest.raises(AdapterMalformed, match=r"not a draft LoRA, since draft/adapter_model\.safetensors is missing"):
        store.fetch(folder(half, name="half"))


@pytest.mark.parametrize(("lacks", "error"), [("adapter_config.json", "no adapter_config"), (WEIGHTS, "neither")])
def test_a_folder_without_an_adapter_is_said_to_be_one(
    gateway: RadosGateway, folder: Any, make_files: Make, tmp_path: Path, lacks: str, error: str
) -> None:
    files = make_files()
    del files[lacks]
    store = make_store(tmp_path / "c", gateway.endpoint)
    with pytest.raises(AdapterMissing, match=error):
        store.fetch(folder(files, name=lacks))


def test_a_missing_folder_is_no_adapter_and_a_missing_bucket_is_an_error(gateway: RadosGateway, tmp_path: Path) -> None:
    store = make_store(tmp_path / "c", gateway.endpoint)
    assert store.find(f"s3://{BUCKET}/nowhere") is None
    with pytest.raises(AdapterUnavailable, match="there is no bucket 'nobucket'"):
        store.find("s3://nobucket/nowhere")


def test_an_interrupted_download_goes_on_where_it_stopped(
    proxy: TCPProxy, folder: Any, make_files: Make, read_files: Read, tmp_path: Path
) -> None:
    files = make_files(3, LARGE)
    uri = folder(files)
    proxy.cut_after_bytes = 3_000_000  # of each answer; a part has 8 MiB
    store = make_store(tmp_path / "c", proxy.endpoint)
    with store.open(uri) as found:
        assert read_files(found) == files
    assert proxy.num_bytes < 1.2 * LARGE


def test_a_server_killed_amid_a_download_leaves_nothing_half_loaded(
    gateway: RadosGateway, proxy: TCPProxy, folder: Any, make_files: Make, read_files: Read, tmp_path: Path
) -> None:
    files = make_files(4, LARGE)
    uri = folder(files)
    proxy.bytes_per_s = 2e6
    store = make_store(tmp_path / "c", proxy.endpoint)
    with ThreadPoolExecutor(1) as pool:
        fetch = pool.submit(store.fetch, uri)
        while proxy.num_bytes < 2_000_000:
            time.sleep(0.01)
        gateway.kill()
        try:
            with pytest.raises(AdapterUnavailable, match="attempts"):
                fetch.result(60)
            assert nothing_is_left_of_it(tmp_path / "c")
        finally:
            gateway.restart()
    proxy.bytes_per_s = None
    with store.open(uri) as found:
        assert read_files(found) == files


def test_a_server_that_comes_back_in_time_is_waited_for(
    gateway: RadosGateway, proxy: TCPProxy, folder: Any, make_files: Make, read_files: Read, tmp_path: Path
) -> None:
    files = make_files(5, LARGE)
    uri = folder(files)
    proxy.bytes_per_s = 2e6
    with ThreadPoolExecutor(1) as pool:
        fetch = pool.submit(make_store(tmp_path / "c", proxy.endpoint).fetch, uri)
        while proxy.num_bytes < 2_000_000:
            time.sleep(0.01)
        gateway.kill()
        gateway.restart()
        proxy.bytes_per_s = None
        assert read_files(tmp_path / "c" / "adapters" / fetch.result(60)) == files


def test_a_slow_server_is_given_up_in_time(
    proxy: TCPProxy, folder: Any, make_files: Make, read_files: Read, tmp_path: Path
) -> None:
    files = make_files(6, LARGE)
    uri = folder(files)
    store = make_store(tmp_path / "c", proxy.endpoint, timeout_s=2.0)
    assert store.find(f"{uri}-warm") is None
    proxy.bytes_per_s = 500_000
    with pytest.raises(AdapterUnavailable, match="longer than 2 s"):
        store.fetch(uri)
    assert proxy.num_bytes < LARGE
    assert nothing_is_left_of_it(tmp_path / "c")
    proxy.bytes_per_s = None
    with store.open(uri) as found:
        assert read_files(found) == files


def test_a_corrupt_object_is_refused_until_it_is_uploaded_again(
    gateway: RadosGateway, folder: Any, make_files: Make, tmp_path: Path
) -> None:
    uri = folder(make_files(7, 100_000))
    gateway.rot(f"{uri.partition(BUCKET + '/')[2]}/{WEIGHTS}")
    store = make_store(tmp_path / "c", gateway.endpoint)
    with pytest.raises(AdapterMalformed, match="is damaged: its 100000 bytes do not match the md5"):
        store.fetch(uri)
    assert nothing_is_left_of_it(tmp_path / "c")
    folder(make_files(7, 100_000))
    assert store.fetch(uri)


def test_the_uploaders_own_sha256_is_checked(
    gateway: RadosGateway, folder: Any, make_files: Make, tmp_path: Path
) -> None:
    files = make_files(8)
    uri = folder(files)
    key = f"{uri.partition(BUCKET + '/')[2]}/{WEIGHTS}"
    store = make_store(tmp_path / "c", gateway.endpoint)
    for data, fits in ((b"other", False), (files[WEIGHTS], True)):
        gateway.put(key, files[WEIGHTS], Metadata={"sha256": hashlib.sha256(data).hexdigest()})
        if fits:
            assert store.fetch(uri)
        else:
            with pytest.raises(AdapterMalformed, match="sha256"):
                store.fetch(uri)


@pytest.mark.parametrize("part_mib", [8, 5])
def test_a_multipart_upload_is_checked_by_its_parts(
    gateway: RadosGateway, folder: Any, make_files: Make, tmp_path: Path, part_mib: int
) -> None:
    from boto3.s3.transfer import TransferConfig

    files = make_files(9, LARGE)
    uri = folder({"adapter_config.json": files["adapter_config.json"]}, name=str(part_mib))
    (tmp_path / "weights").write_bytes(files[WEIGHTS])
    key = f"{uri.partition(BUCKET + '/')[2]}/{WEIGHTS}"
    parts = TransferConfig(multipart_threshold=1 << 20, multipart_chunksize=part_mib << 20)
    gateway.client.upload_file(str(tmp_path / "weights"), BUCKET, key, Config=parts)
    source = S3Source(S3Config(endpoint_url=gateway.endpoint, region="us-east-1"))
    weights = source.find(uri, FetchDeadline(10, "test", threading.Event()))[1]
    assert weights.checksum is not None
    assert weights.checksum.kind == "multipart"
    assert make_store(tmp_path / "c", gateway.endpoint).fetch(uri)


def test_wrong_credentials_are_named_and_new_ones_need_no_restart(
    gateway: RadosGateway, folder: Any, make_files: Make, tmp_path: Path, credentials: Path
) -> None:
    uri = folder(make_files(10))
    write_credentials(credentials, KEY, "wrong")
    store = make_store(tmp_path / "c", gateway.endpoint)
    with pytest.raises(AdapterUnavailable, match=r"refuses this cluster's credentials: AccessDenied \(HTTP 403\)"):
        store.fetch(uri)
    credentials.write_text("")
    with pytest.raises(AdapterUnavailable, match=r"Unable to locate credentials\. Set credentials"):
        store.fetch(uri)
    write_credentials(credentials, KEY, SECRET)
    assert store.fetch(uri)


def test_a_session_that_has_expired_is_named_and_the_next_one_needs_no_restart(
    gateway: RadosGateway, folder: Any, make_files: Make, tmp_path: Path, credentials: Path
) -> None:
    first, second = folder(make_files(13)), folder(make_files(14))
    write_credentials(credentials, *gateway.session(8))
    ends = time.monotonic() + 9
    store = make_store(tmp_path / "c", gateway.endpoint)
    assert store.fetch(first)
    time.sleep(ends - time.monotonic())
    with pytest.raises(AdapterUnavailable, match=r"refuses this cluster's credentials: AccessDenied \(HTTP 403\)"):
        store.fetch(second)
    write_credentials(credentials, *gateway.session(600))
    assert store.fetch(second)


def test_credentials_that_end_amid_the_work_are_named_and_may_come_back(
    gateway: RadosGateway, folder: Any, make_files: Make, tmp_path: Path
) -> None:
    uri = folder(make_files(11))
    store = make_store(tmp_path / "c", gateway.endpoint)
    assert store.find(f"{uri}-none") is None
    gateway.suspend_user()
    try:
        with pytest.raises(AdapterUnavailable, match=r"refuses this cluster's credentials: UserSuspended \(HTTP 403\)"):
            store.fetch(uri)
    finally:
        gateway.enable_user()
    assert store.fetch(uri)


def test_a_public_bucket_needs_no_credentials(
    gateway: RadosGateway, folder: Any, make_files: Make, tmp_path: Path, credentials: Path
) -> None:
    uri = folder(make_files(12))
    credentials.unlink()
    anonymous = make_store(tmp_path / "c", gateway.endpoint, anonymous=True)
    with pytest.raises(AdapterUnavailable, match="AccessDenied"):
        anonymous.fetch(uri)
    gateway.client.put_bucket_acl(Bucket=BUCKET, ACL="public-read")
    for file in make_files(12):
        gateway.client.put_object_acl(Bucket=BUCKET, Key=f"{uri.partition(BUCKET + '/')[2]}/{file}", ACL="public-read")
    try:
        assert anonymous.fetch(uri)
    finally:
        gateway.client.put_bucket_acl(Bucket=BUCKET, ACL="private")


def test_a_profile_is_used_and_an_unknown_one_is_named(
    gateway: RadosGateway, folder: Any, make_files: Make, tmp_path: Path, credentials: Path
) -> None:
    uri = folder(make_files(13))
    credentials.write_text(credentials.read_text().replace("[default]", "[team]"))
    with pytest.raises(AdapterUnavailable, match="other"):
        make_store(tmp_path / "c", gateway.endpoint, profile="other").fetch(uri)
    assert make_store(tmp_path / "c", gateway.endpoint, profile="team").fetch(uri)


class Changing(S3Source):
    """Calls `change` amid each download of the weights, `times` times."""

    change: Callable[[], None]
    times = 1

    def read(self, file: RemoteFile, start: int, end: int, deadline: FetchDeadline) -> Generator[bytes, None, None]:
        if file.name == WEIGHTS and start > 0 and self.times > 0:
            self.times -= 1
            self.change()
        yield from super().read(file, start, end, deadline)


@pytest.mark.parametrize("times", [1, 99])
def test_an_object_that_changes_amid_the_download_is_never_mixed(
    gateway: RadosGateway,
    folder: Any,
    make_files: Make,
    read_files: Read,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    times: int,
) -> None:
    monkeypatch.setattr(download, "PARALLEL_PARTS", 1)
    uri = folder(make_files(14, LARGE))
    seeds = iter(range(15, 200))
    source = Changing(S3Config(endpoint_url=gateway.endpoint, region="us-east-1"))
    source.times = times
    source.change = lambda: folder(make_files(next(seeds), LARGE))
    store = make_store(tmp_path / "c", gateway.endpoint)
    store._sources["s3"] = source
    if times == 1:
        with store.open(uri) as found:
            assert read_files(found) == make_files(15, LARGE)
    else:
        with pytest.raises(AdapterChanged, match=r"adapter_model\.safetensors changed while it was read"):
            store.fetch(uri)
        assert nothing_is_left_of_it(tmp_path / "c")


def test_a_large_adapter_is_refused_before_it_is_read(
    proxy: TCPProxy, folder: Any, make_files: Make, tmp_path: Path
) -> None:
    uri = folder(make_files(16, LARGE))
    with pytest.raises(AdapterTooLarge, match="Raise its max_bytes"):
        make_store(tmp_path / "c", proxy.endpoint, max_bytes=1_000_000).fetch(uri)
    with pytest.raises(AdapterTooLarge, match="Raise lora_cache_bytes"):
        make_store(tmp_path / "d", proxy.endpoint, cache_bytes=1_000_000).fetch(uri)
    assert proxy.num_bytes < 100_000


def test_two_processes_that_want_one_adapter_download_it_once(
    proxy: TCPProxy, folder: Any, make_files: Make, tmp_path: Path
) -> None:
    uri = folder(make_files(17, LARGE))
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    both = [
        context.Process(target=fetch_elsewhere, args=(str(tmp_path / "c"), proxy.endpoint, uri, results))
        for _ in range(2)
    ]
    for process in both:
        process.start()
    assert results.get(timeout=60) == results.get(timeout=60)
    for process in both:
        process.join()
    assert LARGE < proxy.num_bytes < 1.1 * LARGE


def test_a_crash_amid_a_download_leaves_nothing_to_be_seen(
    gateway: RadosGateway, folder: Any, make_files: Make, read_files: Read, tmp_path: Path
) -> None:
    files = make_files(18, LARGE)
    uri, cache = folder(files), tmp_path / "c"
    process = multiprocessing.get_context("spawn").Process(
        target=die_fetching, args=(str(cache), gateway.endpoint, uri)
    )
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert list((cache / "adapters").iterdir()) == []
    assert len(list((cache / "drafts").iterdir())) == 1
    with make_store(cache, gateway.endpoint, cache_bytes=int(1.5 * LARGE)).open(uri) as found:
        assert read_files(found) == files
    assert list((cache / "drafts").iterdir()) == []


def test_bytes_that_rot_on_the_nodes_disk_are_fetched_anew(
    gateway: RadosGateway, folder: Any, make_files: Make, tmp_path: Path
) -> None:
    files = make_files(19)
    uri = folder(files)
    store = make_store(tmp_path / "c", gateway.endpoint)
    digest = store.fetch(uri)

    def use(found: Path) -> bytes:
        data = (found / WEIGHTS).read_bytes()
        if data != files[WEIGHTS]:
            raise AdapterChanged("what the loader says")
        return data

    (tmp_path / "c" / "adapters" / digest / WEIGHTS).write_bytes(b"rotten")
    assert store.read(uri, digest, use) == files[WEIGHTS]


def test_stopping_ends_a_download(proxy: TCPProxy, folder: Any, make_files: Make, tmp_path: Path) -> None:
    uri = folder(make_files(20, LARGE))
    proxy.bytes_per_s = 500_000
    store = make_store(tmp_path / "c", proxy.endpoint)
    fetch = store.pool.submit(store.fetch, uri)
    while proxy.num_bytes < 200_000:
        time.sleep(0.01)
    store.stop()
    assert proxy.num_bytes < LARGE
    with pytest.raises(AdapterUnavailable, match="stopped"):
        fetch.result(0)
    assert nothing_is_left_of_it(tmp_path / "c")


async def test_the_resolver_makes_uris_of_names_and_asks_for_the_right_base(
    proxy: TCPProxy, folder: Any, make_files: Make, tmp_path: Path
) -> None:
    folder(make_files(21, LARGE, base="org/base"), name="org/base/sql")
    folder(make_files(22, LARGE, base="org/other"), name="org/base/foreign")
    test = "test_the_resolver_makes_uris_of_names_and_asks_for_the_right_base"
    template = f"s3://{BUCKET}/{test}/{{base_model_name}}/{{lora_name}}"
    store = make_store(tmp_path / "c", proxy.endpoint)
    resolver = RemoteResolver(template, store, ["/models/base"])
    found = await resolver.resolve_lora("org/base", "sql")
    assert found is not None
    assert found.lora_path == f"s3://{BUCKET}/{test}/org/base/sql"
    assert store.cache.holds(found.digest)
    assert proxy.num_bytes < 1.1 * LARGE
    assert await resolver.resolve_lora("org/base", "foreign") is None  # and its weights were not asked for
    assert proxy.num_bytes < 1.1 * LARGE
    assert await resolver.resolve_lora("org/base", "missing") is None


@pytest.mark.parametrize(
    "uri",
    [
        "s3://",
        "s3://bucket",
        "s3://bucket/",
        "s3:///key",
        "s3://b/a/../c",
        "s3://b/a//c",
        "s3://\0/a",
        "s3://no bucket/a",
        f"s3://{'b' * 256}/a",
    ],
)
def test_what_is_no_folder_of_a_bucket_is_refused(uri: str) -> None:
    with pytest.raises(InvalidRequest, match="s3://bucket/folder"):
        split(uri)
