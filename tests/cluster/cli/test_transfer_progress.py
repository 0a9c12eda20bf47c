"""The bar of an upload or a download: for people at a terminal, and nobody else."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import httpx
import pytest

from lorafleet.client.admin import AdminClient
from lorafleet.client.results import Adapter
from lorafleet.cluster.cli.transfer_progress import DOWNLOAD, UPLOAD, transfer_progress
from lorafleet.protocol.adapter_formats.adapter_files import CONFIG_NAME, SAFETENSORS_NAME


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Called in the test itself, since pytest sets sys.stderr again when a test begins."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    return terminal


def test_a_terminal_sees_the_bytes_and_then_that_the_replicas_load(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_a_terminal(monkeypatch)
    with transfer_progress("table", UPLOAD) as on_upload:
        assert on_upload is not None
        assert terminal.getvalue() == "", "nothing is shown before an upload begins"
        on_upload(1 << 20, 4 << 20)
        on_upload(4 << 20, 4 << 20)
    assert "the replicas load it" in terminal.getvalue()


def test_a_terminal_sees_a_download_and_then_that_it_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_a_terminal(monkeypatch)
    with transfer_progress("table", DOWNLOAD) as on_download:
        assert on_download is not None
        on_download(4 << 20, 4 << 20)
    assert "Downloaded; its digest is checked" in terminal.getvalue()


def test_programs_see_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_terminal(monkeypatch)
    with transfer_progress("json", UPLOAD) as on_upload:
        assert on_upload is None
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with transfer_progress("table", UPLOAD) as on_upload:
        assert on_upload is None


def test_a_client_says_how_much_of_an_upload_is_sent(tmp_path: Path) -> None:
    (tmp_path / CONFIG_NAME).write_text("{}")
    (tmp_path / SAFETENSORS_NAME).write_bytes(bytes(3 << 20))
    received = b""

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal received
        received = request.read()
        assert request.headers["content-length"] == str(len(received)) and "transfer-encoding" not in request.headers
        return httpx.Response(
            200,
            json={"id": "sql", "object": "adapter", "tenant": None, "pinned_replicas": 0}
            | {"removing": False, "versions": [], "aliases": {}},
        )

    steps: list[tuple[int, int]] = []
    transport = httpx.MockTransport(answer)
    with AdminClient("http://host", transport=transport, on_upload=lambda *step: steps.append(step)) as client:
        assert client.push("sql", tmp_path) == Adapter("sql", "adapter", None, 0, False, [], {})
    assert len(steps) > 3 and steps == sorted(steps) and steps[-1] == (len(received), len(received))
