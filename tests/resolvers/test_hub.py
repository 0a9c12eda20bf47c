"""The hub source, over a local server that answers as the hub does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from file_server import FileServer
from lorafleet.protocol.errors import AdapterMalformed, AdapterMissing, AdapterUnavailable, Forbidden, InvalidRequest
from lorafleet.protocol.sources import HubConfig, SourcesConfig
from lorafleet.resolvers.hub import split
from lorafleet.resolvers.remote import RemoteResolver
from lorafleet.resolvers.store import AdapterStore
from stores import kept

Make = Callable[..., dict[str, bytes]]
Read = Callable[[Path], dict[str, bytes]]
COMMIT = "c" * 40


class Hub(FileServer):
    def put_repo(self, repo: str, files: dict[str, bytes], revision: str = "main", commit: str = COMMIT) -> None:
        """As the hub has it: large files by their sha256, small ones by git's sha1, both named at a commit."""
        siblings = []
        for name, data in files.items():
            git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            one: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": git}
            if name.endswith(".safetensors"):
                one["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 100}
            siblings.append(one)
            self.files[f"/{repo}/resolve/{commit}/{name}"] = data
        info = {"id": repo, "modelId": repo, "sha": commit, "siblings": siblings, "tags": [], "private": False}
        self.answers[f"/api/models/{repo}/revision/{revision}"] = (200, json.dumps(info).encode())


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    made = Hub()
    yield made
    made.close()


def make_store(cache: Path, hub: Hub, *allow: str, **fields: Any) -> AdapterStore:
    config = HubConfig(allow=allow or ("org/*",), endpoint=hub.url, **fields)
    return kept(SourcesConfig(hub=config, cache_dir=str(cache)))


def test_a_repo_is_fetched_at_its_commit(hub: Hub, make_files: Make, read_files: Read, tmp_path: Path) -> None:
    hub.put_repo("org/sql", make_files(1, 20_000_000) | {"README.md": b"read me"})
    store = make_store(tmp_path, hub)
    with store.open("hf://org/sql") as found:
        assert read_files(found) == make_files(1, 20_000_000)
    asked = [path for path, _ in hub.requests if "/resolve/" in path]
    assert all(f"/resolve/{COMMIT}/" in path for path in asked)
    assert not any("README" in path for path in asked)
    assert all(headers["authorization"] == "Bearer hf_secret" for _, headers in hub.requests)
    sent = hub.num_bytes
    assert store.fetch("hf://org/sql") == found.name
    assert hub.num_bytes == sent


def test_the_token_does_not_follow_a_redirect_to_another_host(
    hub: Hub, make_files: Make, read_files: Read, tmp_path: Path
) -> None:
    hub.put_repo("org/sql", make_files())
    elsewhere = FileServer()
    elsewhere.etags = False
    path = f"/org/sql/resolve/{COMMIT}/adapter_model.safetensors"
    elsewhere.files["/blob"] = hub.files.pop(path)
    hub.redirects[path] = f"{elsewhere.url}/blob?signature=1"
    with make_store(tmp_path, hub).open("hf://org/sql") as found:
        assert read_files(found) == make_files()
    assert elsewhere.requests
    assert not any("authorization" in headers for _, headers in elsewhere.requests)
    elsewhere.close()


def test_revisions_and_folders_are_found(hub: Hub, make_files: Make, read_files: Read, tmp_path: Path) -> None:
    for name, seed in (("v1", 1), ("v2", 2)):
        files = {f"deep/{file}": data for file, data in make_files(seed).items()}
        hub.put_repo("org/sql", files, revision=name, commit=str(seed) * 40)
    store = make_store(tmp_path, hub, revision="v1")
    for uri, seed in (("hf://org/sql/deep", 1), ("hf://org/sql/deep@v2", 2)):
        with store.open(uri) as found:
            assert read_files(found) == make_files(seed)
    assert store.find("hf://org/sql") is None


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_damaged_file_is_refused(hub: Hub, make_files: Make, tmp_path: Path, name: str) -> None:
    hub.put_repo("org/sql", make_files())
    path = f"/org/sql/resolve/{COMMIT}/{name}"
    hub.files[path] = hub.files[path][:-1] + b"X"
    with pytest.raises(AdapterMalformed, match="git" if name.endswith("json") else "sha256"):
        make_store(tmp_path, hub).fetch("hf://org/sql")
    assert list((tmp_path / "adapters").iterdir()) == []


async def test_only_allowed_repos_are_asked_for(hub: Hub, make_files: Make, tmp_path: Path) -> None:
    hub.put_repo("other/sql", make_files())
    hub.put_repo("org/sql", make_files())
    store = make_store(tmp_path, hub, "org/*", "one/adapter")
    with pytest.raises(Forbidden, match="org/\\*, one/adapter"):
        store.fetch("hf://other/sql")
    resolver = RemoteResolver("hf://{lora_name}", store)
    assert await resolver.resolve_lora("base", "other/sql") is None
    assert await resolver.resolve_lora("base", "sql") is None
    assert await resolver.resolve_lora("base", "org/sql@refs/pr/1") is None  # anybody's
    assert hub.requests == []
    assert await resolver.resolve_lora("base", "org/sql") is not None


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (403, "GatedRepo", "is gated"),
        (404, "RevisionNotFound", "has no revision 'main'"),
        (400, "", "HTTP 400"),
    ],
)
def test_a_refusal_is_an_error_that_says_why(hub: Hub, tmp_path: Path, status: int, code: str, words: str) -> None:
    hub.answers["/api/models/org/sql/revision/main"] = (status, b"{}")
    hub.headers = {"x-error-code": code}
    with pytest.raises(AdapterUnavailable, match=words):
        make_store(tmp_path, hub).fetch("hf://org/sql")


def test_a_repo_that_is_not_there_is_no_adapter(hub: Hub, tmp_path: Path) -> None:
    hub.headers = {"x-error-code": "RepoNotFound"}
    assert make_store(tmp_path, hub).find("hf://org/sql") is None


def test_a_hub_that_fails_for_a_while_is_tried_again(hub: Hub, make_files: Make, tmp_path: Path) -> None:
    hub.put_repo("org/sql", make_files())
    hub.failures = 2
    assert make_store(tmp_path, hub).fetch("hf://org/sql")


@pytest.mark.parametrize("uri", ["hf://", "hf://org", "hf://org/", "hf://org/../name", "hf:///org/name//x"])
def test_what_is_no_repo_is_refused(uri: str) -> None:
    with pytest.raises(InvalidRequest, match="hf://org/name"):
        split(uri)


@pytest.mark.parametrize("repo", ["org/a--b", "-org/a", "org/a.", "org/a b", f"org/{'a' * 100}"])
def test_a_name_that_no_repo_can_have_is_refused_without_being_asked_for(hub: Hub, tmp_path: Path, repo: str) -> None:
    with pytest.raises(InvalidRequest, match="not the name of a repo"):
        make_store(tmp_path, hub, "*").fetch(f"hf://{repo}")
    assert hub.requests == []


async def test_a_resolver_takes_such_a_name_for_one_that_nobody_has(hub: Hub, tmp_path: Path) -> None:
    resolver = RemoteResolver("hf://{lora_name}", make_store(tmp_path, hub, "*"))
    assert await resolver.resolve_lora("base", "org/a--b") is None


def test_a_uri_says_repo_folder_and_revision() -> None:
    assert split("hf://org/name") == ("org/name", "", "")
    assert split("hf://org/name/a/b@v1") == ("org/name", "a/b", "v1")


def test_a_repo_in_other_letters_or_by_a_former_name_is_none(hub: Hub, make_files: Make, tmp_path: Path) -> None:
    hub.put_repo("org/sql", make_files())
    answer = hub.answers["/api/models/org/sql/revision/main"]
    hub.answers |= {f"/api/models/org/{other}/revision/main": answer for other in ("SQL", "former")}
    store = make_store(tmp_path, hub)
    for other in ("SQL", "former"):
        with pytest.raises(AdapterMissing):
            store.fetch(f"hf://org/{other}")
    assert store.fetch("hf://org/sql")
