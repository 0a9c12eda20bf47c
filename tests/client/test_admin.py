"""The clients against a real server: what they say is done, and what it refuses is raised in its words."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from lorafleet.client.admin import AdminClient, AsyncAdminClient
from lorafleet.client.client_errors import APIConnectionError, APIError, APIStatusError
from lorafleet.protocol.adapter_formats.adapter_files import folder_digest
from real_server import ADMIN_KEY
from tests.client.conftest import Served

ROOT = Path(__file__).parents[2]
DIGEST_CHARS = 64


def test_an_adapter_is_pushed_moved_split_pinned_checked_and_removed(served: Served) -> None:
    with AdminClient(served.url, ADMIN_KEY) as client:
        pushed = client.push("org/sql", served.one, metadata={"run": "7"})
        assert [(one.number, one.metadata) for one in pushed.versions] == [(1, {"run": "7"})]
        assert len(pushed.versions[0].digest) == DIGEST_CHARS
        assert pushed.aliases["org/sql"].split == {"1": 1.0}
        second = client.push_from("org/sql", str(served.other), activate=False)
        assert second.aliases["org/sql"].split == {"1": 1.0}
        assert client.alias("org/sql", {1: 9, 2: 1}).aliases["org/sql"].split == {"1": 9.0, "2": 1.0}
        assert client.rollback("org/sql").aliases["org/sql"].split == {"1": 1.0}
        assert client.alias("org/sql", 2, alias="sql-next").aliases["sql-next"].split == {"2": 1.0}
        assert "sql-next" not in client.unalias("org/sql", "sql-next").aliases
        assert client.pin("org/sql").pinned_replicas == 1
        assert client.unpin("org/sql").pinned_replicas == 0
        assert client.prefetch("org/sql").replicas == ["r0"]
        assert client.verify("org/sql").verified == [1, 2]
        places = client.places("org/sql")
        assert {version.number for version in places.versions} == {1, 2}
        listed = {adapter.name: adapter.versions for adapter in client.list_places().adapters}
        assert listed["org/sql"] == places.versions
        assert client.show("org/sql").versions == second.versions
        assert client.remove("org/sql").removed
        with pytest.raises(APIStatusError, match="no adapter `org/sql`") as refused:
            client.show("org/sql")
        assert (refused.value.status_code, refused.value.code) == (404, "model_not_found")


async def test_the_awaited_client_does_the_same(served: Served, tmp_path: Path) -> None:
    async with AsyncAdminClient(served.url, ADMIN_KEY) as client:
        await client.push("awaited", served.one)
        pushed = await client.push_from("awaited", str(served.other))
        assert pushed.aliases["awaited"].split == {"2": 1.0}
        assert (await client.rollback("awaited")).aliases["awaited"].split == {"1": 1.0}
        assert (await client.alias("awaited", 2, "second")).aliases["second"].split == {"2": 1.0}
        assert "second" not in (await client.unalias("awaited", "second")).aliases
        assert (await client.pin("awaited")).pinned_replicas == 1
        assert (await client.unpin("awaited")).pinned_replicas == 0
        assert (await client.prefetch("awaited")).replicas == ["r0"]
        assert (await client.verify("awaited")).verified == [1, 2]
        got = await client.download("awaited", tmp_path / "got")
        assert got.digest == pushed.versions[0].digest == folder_digest(tmp_path / "got")
        assert "awaited" in [one.id async for one in client.list()]
        assert (await client.remove("awaited")).removed
        with pytest.raises(APIStatusError, match="no adapter `awaited`"):
            await client.show("awaited")


def test_a_pushed_adapter_is_downloaded_with_the_same_digest(served: Served, tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    with AdminClient(served.url, ADMIN_KEY, on_download=lambda *step: steps.append(step)) as client:
        client.push("org/back", served.one)
        second = client.push("org/back", served.other).versions[1]
        got = client.download("org/back", tmp_path / "new" / "back")
        assert (got.id, got.version, got.digest) == ("org/back", 2, second.digest)
        assert got.folder == str(tmp_path / "new" / "back") and folder_digest(Path(got.folder)) == second.digest
        assert steps == sorted(steps) and steps[-1][0] == steps[-1][1] > got.num_bytes
        client.alias("org/back", {1: 1, 2: 1})
        with pytest.raises(APIStatusError, match=r"stands for version 1 \(50%\), version 2") as refused:
            client.download("org/back", tmp_path / "split")
        assert (refused.value.status_code, refused.value.param) == (400, "version")
        with pytest.raises(APIStatusError, match="no version 7; it has 1, 2"):
            client.download("org/back", tmp_path / "split", version=7)
        assert client.download("org/back", tmp_path / "split", version=1).digest == folder_digest(served.one)
        client.alias("org/back", 1, "back-alias")
        assert client.download("back-alias", tmp_path / "alias").version == 1
        client.remove("org/back")
        with pytest.raises(APIStatusError) as refused:
            client.download("org/back", tmp_path / "gone")
        assert (refused.value.status_code, refused.value.code) == (404, "model_not_found")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alias", "new", "split"]


def test_an_adapter_whose_folder_was_overwritten_is_not_downloaded(served: Served, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    shutil.copytree(served.one, folder)
    served.seed("overwritten", folder)
    with AdminClient(served.url, ADMIN_KEY) as client:
        assert client.download("overwritten", tmp_path / "copy").digest == folder_digest(served.one)
        shutil.copytree(served.other, folder, dirs_exist_ok=True)
        with pytest.raises(APIStatusError, match="its files now have digest") as refused:
            client.download("overwritten", tmp_path / "second")
        assert (refused.value.status_code, refused.value.code) == (409, "adapter_changed")
        client.remove("overwritten")
    assert not (tmp_path / "second").exists()


def test_the_list_goes_on_over_pages(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lorafleet.client.admin.PAGE", 2)
    names = [f"page{number}" for number in range(5)]
    with AdminClient(served.url, ADMIN_KEY) as client:
        for name in names:
            client.push(name, served.one)
        assert [one.id for one in client.list(after="page") if one.id.startswith("page")] == names
        assert [one.id for one in client.page(after="page1", limit=2).data] == ["page2", "page3"]
        for name in names:
            client.remove(name)


def test_a_folder_is_pushed_with_its_tokenizer_and_has_the_digest_it_has_on_the_server(
    served: Served, tmp_path: Path
) -> None:
    folder = tmp_path / "worded"
    shutil.copytree(served.one, folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    (folder / "training_args.bin").write_bytes(b"not sent")
    with AdminClient(served.url, ADMIN_KEY) as client:
        [sent], [read] = (client.push("worded", folder).versions, client.push_from("worded2", str(folder)).versions)
        [plain] = client.push("plain", served.one).versions
        for name in ("worded", "worded2", "plain"):
            client.remove(name)
    assert sent.digest == read.digest != plain.digest


def test_what_is_refused_is_raised_with_status_code_and_the_servers_words(served: Served, tmp_path: Path) -> None:
    with AdminClient(served.url, "another key") as stranger, pytest.raises(APIStatusError) as refused:
        stranger.page()
    assert (refused.value.status_code, refused.value.code) == (401, "invalid_api_key")
    with AdminClient(served.url, ADMIN_KEY) as client:
        with pytest.raises(APIStatusError, match="base model's own") as refused:
            client.push("llama", served.one)
        assert (refused.value.status_code, refused.value.param) == (400, "lora_name")
        with pytest.raises(FileNotFoundError, match=r"needs adapter_config\.json"):
            client.push("empty", tmp_path)


def test_key_and_address_come_from_the_environment(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAFLEET_URL", served.url)
    monkeypatch.setenv("LORAFLEET_ADMIN_KEY", ADMIN_KEY)
    with AdminClient() as client:
        assert client.page().object == "list"
    with AdminClient(key="") as nobody, pytest.raises(APIStatusError, match="admin key"):
        nobody.page()


@pytest.mark.parametrize(
    ("status", "body", "error", "words"),
    [
        (502, b"<html>Bad Gateway</html>", APIStatusError, "<html>Bad Gateway"),
        (503, b"", APIStatusError, "Service Unavailable"),
        (200, b"<html>a captive portal</html>", APIConnectionError, "did not answer as a lorafleet server does"),
    ],
)
def test_an_answer_of_something_else_than_the_server_is_an_error(
    status: int, body: bytes, error: type[APIError], words: str
) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(status, content=body))
    with AdminClient("http://proxy", "key", transport=transport) as client, pytest.raises(error, match=words):
        client.show("sql")


@pytest.mark.parametrize(
    ("url", "words"),
    [("http://127.0.0.1:1", "does not answer"), ("http://host:port", "is not a URL"), ("host", "http")],
)
def test_a_server_that_cannot_be_reached_is_an_error_with_its_address(url: str, words: str) -> None:
    with pytest.raises(APIError, match=words), AdminClient(url, "") as client:
        client.page()


def test_the_client_needs_neither_ray_nor_torch() -> None:
    code = "import json, sys, lorafleet.client.admin; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True)
    assert {"ray", "torch", "transformers", "numpy"}.isdisjoint(json.loads(done.stdout))
