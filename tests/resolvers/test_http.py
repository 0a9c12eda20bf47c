"""The HTTP source, over a server that has or lacks what others have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

from file_server import FileServer
from lorafleet.protocol.adapter_formats.adapter_files import OPTIONAL_NAMES
from lorafleet.protocol.errors import (
    AdapterChanged,
    AdapterMalformed,
    AdapterMissing,
    AdapterTooLarge,
    AdapterUnavailable,
    Forbidden,
    InvalidRequest,
)
from lorafleet.protocol.sources import HTTPConfig, SourcesConfig
from lorafleet.resolvers.remote import RemoteResolver
from lorafleet.resolvers.store import AdapterStore
from stores import kept

Make = Callable[..., dict[str, bytes]]
Read = Callable[[Path], dict[str, bytes]]
WEIGHTS = "adapter_model.safetensors"
LARGE = 20_000_000  # three parts


@pytest.fixture
def server() -> Iterator[FileServer]:
    made = FileServer()
    yield made
    made.close()


def make_store(cache: Path, *allow: str, **fields: Any) -> AdapterStore:
    return kept(SourcesConfig(http=HTTPConfig(allow=allow, **fields), cache_dir=str(cache)))


@pytest.mark.parametrize(
    ("has", "requests"),
    [
        ({"etags": True}, 2 + 1 + 3),  # two are described, then come in one and three parts; a language is asked for
        ({"etags": False, "dates": True}, 2 + 1 + 3),
        ({"etags": False}, 2 + 1 + 1),
        ({"ranges": False}, 2 + 1 + 1),
        ({"digests": True}, 2 + 1 + 3),
    ],
    ids=["etags", "dates", "neither", "no ranges", "digests"],
)
def test_an_adapter_is_fetched_from_any_server(
    server: FileServer, make_files: Make, read_files: Read, tmp_path: Path, has: dict[str, bool], requests: int
) -> None:
    for name, value in has.items():
        setattr(server, name, value)
    uri = server.put("/a", make_files(1, LARGE))
    with make_store(tmp_path, f"{server.url}/").open(uri) as found:
        assert read_files(found) == make_files(1, LARGE)
    assert len(server.requests) == requests + len(OPTIONAL_NAMES)


def test_the_tokenizer_and_chat_template_come_along_and_count(
    server: FileServer, make_files: Make, read_files: Read, tmp_path: Path
) -> None:
    language = {"tokenizer.json": b"{}", "chat_template.jinja": b"a"}
    uri = server.put("/a", make_files() | language | {"README.md": b"of no meaning"})
    store = make_store(tmp_path, f"{server.url}/")
    first = store.fetch(uri)
    with store.open(uri, first) as found:
        assert read_files(found) == make_files() | language
    server.put("/a", make_files() | language | {"chat_template.jinja": b"b"})
    assert store.fetch(uri) != first


def test_a_draft_lora_comes_along_and_counts(
    server: FileServer, make_files: Make, read_files: Read, tmp_path: Path
) -> None:
    draft = {f"draft/{name}": content for name, content in make_files(7).items()}
    uri = server.put("/a", make_files() | draft)
    store = make_store(tmp_path, f"{server.url}/")
    first = store.fetch(uri)
    with store.open(uri, first) as found:
        assert read_files(found) == make_files() | draft
    assert store.cache.counts().num_bytes >= sum(map(len, (make_files() | draft).values()))
    assert store.fetch(server.put("/b", make_files())) != first
    server.put("/a", {"draft/adapter_model.safetensors": b"other"})
    assert store.fetch(uri) != first


def test_an_unchanged_adapter_is_not_read_again(server: FileServer, make_files: Make, tmp_path: Path) -> None:
    uri = server.put("/a", make_files())
    store = make_store(tmp_path, f"{server.url}/")
    first = store.fetch(uri)
    sent = server.num_bytes
    assert store.fetch(uri) == first
    assert server.num_bytes <= sent + 2
    server.put("/a", make_files(2))
    assert store.fetch(uri) != first


@pytest.mark.parametrize("ranges", [True, False])
def test_what_is_cut_off_or_refused_for_a_while_is_tried_again(
    server: FileServer, make_files: Make, read_files: Read, tmp_path: Path, ranges: bool
) -> None:
    server.ranges = ranges
    uri = server.put("/a", make_files(2, 4_000_000))
    server.cut_after_bytes = 1_500_000 if ranges else None
    server.failures = 2
    with make_store(tmp_path, f"{server.url}/").open(uri) as found:
        assert read_files(found) == make_files(2, 4_000_000)
    if ranges:
        assert server.num_bytes < 4_100_000  # each byte once


def test_a_server_that_is_gone_is_an_error(server: FileServer, tmp_path: Path) -> None:
    server.close()
    store = make_store(tmp_path, f"{server.url}/", timeout_s=1)
    with pytest.raises(AdapterUnavailable, match="longer than 1 s"):
        store.fetch(f"{server.url}/a")


def test_a_file_that_changes_amid_the_download_is_never_mixed(
    server: FileServer, make_files: Make, read_files: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = server.put("/a", make_files(3, LARGE))
    answer = server._send_file
    changes = iter(range(4, 100))

    def change_then_answer(request: Any, data: bytes) -> None:
        answer(request, data)
        if len(data) == LARGE and request.headers["range"] == f"bytes=0-{(8 << 20) - 1}" and not done:
            server.put("/a", make_files(next(changes), LARGE))

    done: list[bool] = []
    monkeypatch.setattr(server, "_send_file", change_then_answer)
    monkeypatch.setattr("lorafleet.resolvers.download.PARALLEL_PARTS", 1)
    store = make_store(tmp_path, f"{server.url}/")
    with pytest.raises(AdapterChanged, match="changed while it was read"):
        store.fetch(uri)
    assert list((tmp_path / "adapters").iterdir()) == []
    done.append(True)
    with store.open(uri) as found:
        assert read_files(found) == make_files(next(changes) - 1, LARGE)


def test_damage_is_noticed_where_the_server_gives_a_digest(
    server: FileServer, make_files: Make, tmp_path: Path
) -> None:
    server.digests = True
    uri = server.put("/a", make_files())
    answer = server._send_file
    server._send_file = (
        lambda request, data: answer(  # type: ignore[method-assign]
            request, data if request.headers["range"] == "bytes=0-0" or len(data) < 500 else b"X" + data[1:]
        )
    )
    server.etags = False
    server.dates = True
    with pytest.raises(AdapterMalformed, match="sha256"):
        make_store(tmp_path, f"{server.url}/").fetch(uri)


@pytest.mark.parametrize(
    "path",
    [
        "/private/a",
        "/public",
        "/public/../private/a",
        "/public/%2e%2e/private/a",
        "/public/a?b",
        "/public//a",
        "/public/a#b",
    ],
)
def test_nothing_outside_the_allowed_prefixes_is_asked_for(server: FileServer, tmp_path: Path, path: str) -> None:
    store = make_store(tmp_path, f"{server.url}/public/")
    if path == "/public":  # the folder itself is
        with pytest.raises(AdapterMissing):
            store.fetch(server.url + path)
        return
    with pytest.raises(Forbidden, match="lora_resolver_http allows"):
        store.fetch(server.url + path)
    with pytest.raises(Forbidden):
        store.fetch(f"http://user@{server.url.removeprefix('http://')}/public/a")
    assert server.requests == []


def test_redirects_stay_within_what_is_allowed(
    server: FileServer, make_files: Make, read_files: Read, tmp_path: Path
) -> None:
    server.put("/public/b", make_files())
    server.put("/private", make_files())
    for name in make_files():
        server.redirects[f"/public/a/{name}"] = f"{server.url}/public/b/{name}"
        server.redirects[f"/public/bad/{name}"] = f"/private/{name}"
        server.redirects[f"/public/loop/{name}"] = f"/public/loop/{name}"
    store = make_store(tmp_path, f"{server.url}/public/")
    with store.open(f"{server.url}/public/a") as found:
        assert read_files(found) == make_files()
    with pytest.raises(AdapterUnavailable, match="not allowed"):
        store.fetch(f"{server.url}/public/bad")
    assert not any(path.startswith("/private") for path, _ in server.requests)
    with pytest.raises(AdapterUnavailable, match="more than 5 times"):
        store.fetch(f"{server.url}/public/loop")


@pytest.mark.parametrize("location", ["http://[", "\x7f", "http://h\u00e4\u2028/", "//[::1/a", "http://h:99999999/"])
def test_a_redirect_to_what_is_no_url_is_an_error_of_the_server(
    server: FileServer, tmp_path: Path, location: str
) -> None:
    server.redirects["/public/a/adapter_config.json"] = location.encode().decode("latin-1")
    store = make_store(tmp_path, f"{server.url}/public/", timeout_s=0.2)
    while not any(path == "/public/a/adapter_config.json" for path, _ in server.requests):  # again if this was too slow
        with pytest.raises(AdapterUnavailable):
            store.fetch(f"{server.url}/public/a")


def test_without_a_configuration_no_url_is_asked_for(server: FileServer, tmp_path: Path) -> None:
    store = kept(SourcesConfig(cache_dir=str(tmp_path)))
    with pytest.raises(Forbidden, match="set lora_resolver_http"):
        store.fetch(f"{server.url}/a")
    with pytest.raises(Forbidden, match="set lora_resolver_hub"):
        store.fetch("hf://org/name")
    with pytest.raises(InvalidRequest, match="not an adapter's URI"):
        store.fetch("ftp://host/a")


def test_a_large_adapter_is_refused_before_it_is_read(server: FileServer, make_files: Make, tmp_path: Path) -> None:
    uri = server.put("/a", make_files(4, LARGE))
    with pytest.raises(AdapterTooLarge, match="Raise its max_bytes"):
        make_store(tmp_path, f"{server.url}/", max_bytes=1_000_000).fetch(uri)
    assert server.num_bytes <= 2


def test_the_weights_that_the_loader_would_take_are_fetched(
    server: FileServer, make_files: Make, read_files: Read, tmp_path: Path
) -> None:
    files = make_files()
    both = files | {"adapter_model.bin": b"legacy"}
    legacy = {"adapter_config.json": files["adapter_config.json"], "adapter_model.bin": b"legacy"}
    store = make_store(tmp_path, f"{server.url}/")
    for folder, given, wanted in (("/both", both, files), ("/legacy", legacy, legacy)):
        with store.open(server.put(folder, given)) as found:
            assert read_files(found) == wanted


async def test_the_resolver_takes_a_missing_file_for_no_adapter(
    server: FileServer, make_files: Make, tmp_path: Path
) -> None:
    server.put("/tiny/sql", make_files())
    store = make_store(tmp_path, f"{server.url}/")
    resolver = RemoteResolver(f"{server.url}/{{base_model_name}}/{{lora_name}}", store)
    found = await resolver.resolve_lora("tiny", "sql")
    assert found is not None
    assert found.lora_path == f"{server.url}/tiny/sql"
    assert await resolver.resolve_lora("tiny", "other") is None


def test_a_copy_that_rotted_is_fetched_anew_once_its_other_readers_have_left_it(
    server: FileServer, make_files: Make, tmp_path: Path
) -> None:
    files = make_files()
    uri = server.put("/a", files)
    store = make_store(tmp_path, f"{server.url}/")
    digest = store.fetch(uri)
    (tmp_path / "adapters" / digest / WEIGHTS).write_bytes(b"rotten")
    other, seen = ExitStack(), list[bytes]()
    other.enter_context(store.open(uri, digest))

    def use(folder: Path) -> None:
        seen.append((folder / WEIGHTS).read_bytes())
        if seen[-1] == b"rotten":
            Timer(0.2, other.close).start()
            raise AdapterMalformed("what the loader says")

    store.read(uri, digest, use)
    assert seen == [b"rotten", files[WEIGHTS]]


def test_a_copy_that_rotted_and_is_read_for_long_is_no_adapter_and_says_so(
    server: FileServer, make_files: Make, tmp_path: Path
) -> None:
    def use(_: Path) -> None:
        raise AdapterMalformed("what the loader says")

    uri = server.put("/a", make_files())
    digest = make_store(tmp_path, f"{server.url}/").fetch(uri)
    store = make_store(tmp_path, f"{server.url}/", timeout_s=0.2)
    with pytest.raises(AdapterMalformed, match="what the loader says"):
        store.read(uri, digest, use)
    (tmp_path / "adapters" / digest / WEIGHTS).write_bytes(b"rotten")
    with (
        store.open(uri, digest),
        pytest.raises(AdapterUnavailable, match=r"removing the damaged copy of .*/a took longer than 0\.2 s"),
    ):
        store.read(uri, digest, use)
