"""A download is in its place whole and checked, or the place is as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from lorafleet.client.admin import AdminClient
from lorafleet.client.client_errors import APIConnectionError, APIError, DownloadError
from lorafleet.client.results import Downloaded
from lorafleet.cluster.cli.cli import app
from lorafleet.protocol.adapter_formats.adapter_files import folder_digest
from tests.client.test_unpacking import FILES, tar_of


@pytest.fixture
def digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns the digest of FILES."""
    folder = tmp_path_factory.mktemp("adapter")
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder_digest(folder)


def client_of(answer: httpx.Response) -> AdminClient:
    return AdminClient("http://host", transport=httpx.MockTransport(lambda _: answer))


def tar_answer(digest: str, files: dict[str, bytes] = FILES) -> httpx.Response:
    return httpx.Response(
        200, content=tar_of(files), headers={"x-lorafleet-digest": digest, "x-lorafleet-version": "3"}
    )


def content_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_folder_is_made_with_its_parents_or_an_empty_one_is_filled(tmp_path: Path, digest: str) -> None:
    (tmp_path / "empty").mkdir()
    inode = (tmp_path / "empty").stat().st_ino
    for folder in (tmp_path / "a" / "b", tmp_path / "empty"):
        with client_of(tar_answer(digest)) as client:
            got = client.download("org/sql", folder)
        assert got == Downloaded("org/sql", 3, digest, sum(map(len, FILES.values())), str(folder))
        assert content_of(folder) == FILES
    assert (tmp_path / "empty").stat().st_ino == inode, "it may be a mount, or somebody's current folder"


def test_without_a_folder_the_last_part_of_the_name_is_taken(
    tmp_path: Path, digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with client_of(tar_answer(digest)) as client:
        assert client.download("org/sql").folder == str(tmp_path / "sql")
        for name in ("", "org/", "org/..", "."):
            with pytest.raises(APIError, match="does not end in the name of a folder"):
                client.download(name)


def test_what_is_there_already_stays_unless_forced(tmp_path: Path, digest: str) -> None:
    (tmp_path / "file").write_text("mine")
    old = {"adapter_config.json": b"old", "tokenizer.json": b"old", "README.md": b"mine"}
    folder = tmp_path / "old"
    folder.mkdir()
    for name, content in old.items():
        (folder / name).write_bytes(content)
    with client_of(tar_answer(digest)) as client:
        with pytest.raises(FileExistsError, match="is not a folder"):
            client.download("sql", tmp_path / "file", force=True)
        with pytest.raises(FileExistsError, match="is not empty"):
            client.download("sql", folder)
        assert content_of(folder) == old
        client.download("sql", folder, force=True)
    assert content_of(folder) == FILES | {"README.md": b"mine"}
    assert folder_digest(folder) == digest


class Breaking(httpx.SyncByteStream):
    """A body whose connection breaks in the middle."""

    def __iter__(self) -> Iterator[bytes]:
        yield tar_of(FILES)[:1000]
        raise httpx.RemoteProtocolError("peer closed connection")


@pytest.mark.parametrize("case", ["lying name", "wrong digest", "changed byte", "no weights", "cut off", "broken"])
@pytest.mark.parametrize("is_there", [False, True])
def test_a_damaged_download_leaves_the_place_as_it_was(tmp_path: Path, digest: str, case: str, is_there: bool) -> None:
    headers = {"x-lorafleet-digest": digest}
    answers = {
        "lying name": tar_answer(digest, FILES | {"../x": b"evil"}),
        "wrong digest": tar_answer("0" * 64),
        "changed byte": tar_answer(digest, FILES | {"adapter_config.json": b"[]"}),
        "no weights": tar_answer(digest, {"adapter_config.json": b"{}"}),
        "cut off": httpx.Response(200, content=tar_of(FILES)[:1500], headers=headers),
        "broken": httpx.Response(200, stream=Breaking(), headers=headers | {"content-length": "9999"}),
    }
    folder = tmp_path / "sql"
    if is_there:
        folder.mkdir()
    with client_of(answers[case]) as client, pytest.raises(DownloadError) as failed:
        client.download("sql", folder)
    if case == "broken":
        assert "broke off after 1000 of 9999 bytes: peer closed connection" in failed.value.message
    assert [path.name for path in tmp_path.rglob("*")] == (["sql"] if is_there else [])


def test_an_answer_without_a_digest_is_no_answer_of_the_server(tmp_path: Path) -> None:
    answer = httpx.Response(200, content=tar_of(FILES))
    with client_of(answer) as client, pytest.raises(APIConnectionError, match="did not answer as a lorafleet server"):
        client.download("sql", tmp_path / "sql")
    assert not list(tmp_path.iterdir())


def test_the_command_says_that_a_folder_is_not_empty_before_it_calls_the_server(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    arguments = ["adapters", "download", "sql", "--to", str(tmp_path), "--url", "http://127.0.0.1:1"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1 and "is not empty" in done.output and "--force" in done.output
