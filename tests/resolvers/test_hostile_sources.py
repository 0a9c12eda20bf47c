"""Web servers that send more than they say, or without an end: no fetch fills the disk, and none goes on for ever."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lorafleet.protocol.errors import AdapterTooLarge, AdapterUnavailable, InvalidRequest
from lorafleet.protocol.sources import HTTPConfig, SourcesConfig
from lorafleet.resolvers.store import AdapterStore
from stores import kept

MAX_BYTES = 1 << 20
MEGABYTE = bytes(1 << 20)
ZIPPED = gzip.compress(MEGABYTE * 50)


class Hostile(BaseHTTPRequestHandler):
    """Answers each path in its own bad way."""

    protocol_version = "HTTP/1.1"
    sent = 0

    def do_GET(self) -> None:
        with suppress(OSError):  # the client leaves in the middle
            getattr(self, self.path.split("/")[1])()

    def log_message(self, *_: object) -> None:
        pass

    def head(self, status: int = 200, **headers: object) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()

    def body(self, data: bytes) -> None:
        self.wfile.write(data)
        type(self).sent += len(data)

    def zipped(self) -> None:
        """Fifty megabytes, in fifty kilobytes, whether they were asked for or not."""
        self.head(content_length=len(ZIPPED), content_encoding="gzip")
        self.body(ZIPPED)

    def endless(self) -> None:
        """Chunks without an end, and without a length."""
        self.head(transfer_encoding="chunked")
        while True:
            self.body(b"%x\r\n%s\r\n" % (len(MEGABYTE), MEGABYTE))

    def endless_in_part(self) -> None:
        """It says how large the file is, and sends on and on."""
        self.head(206, content_range="bytes 0-0/1000", transfer_encoding="chunked")
        while True:
            self.body(b"%x\r\n%s\r\n" % (len(MEGABYTE), MEGABYTE))

    def vast(self) -> None:
        self.head(206, content_range=f"bytes 0-0/{1 << 50}", content_length=1)
        self.body(b"x")

    def negative(self) -> None:
        self.head(content_length=-5)

    def no_number(self) -> None:
        self.head(206, content_range="bytes 0-0/*", content_length=1)
        self.body(b"x")

    def endless_number(self) -> None:
        self.head(206, content_range=f"bytes 0-0/{'9' * 5000}", content_length=1)
        self.body(b"x")

    def odd_version(self) -> None:
        """An ETag that no client can send back."""
        part = {"content_range": "bytes 0-0/1"} if "range" in self.headers else {}
        self.head(206 if part else 200, **part, content_length=1, etag='"\xe9"')
        self.body(b"x")

    def long_header(self) -> None:
        self.head(content_length=2, x_padding="x" * (1 << 20))
        self.body(b"{}")

    def around(self) -> None:
        self.head(302, location=f"{self.path}/again", content_length=0)

    def slow(self) -> None:
        self.head(content_length=1000)
        for _ in range(1000):
            self.body(b" ")
            self.server.stopped.wait(0.1)  # type: ignore[attr-defined]  # of serving()


@contextmanager
def serving() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hostile)
    server.daemon_threads = True
    server.stopped = threading.Event()  # type: ignore[attr-defined]  # for those that wait
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.stopped.set()  # type: ignore[attr-defined]
        server.shutdown()
        server.server_close()


def make_store(cache: Path, url: str, **fields: Any) -> AdapterStore:
    http = HTTPConfig(**{"allow": (f"{url}/",), "max_bytes": MAX_BYTES, "timeout_s": 60.0} | fields)
    return kept(SourcesConfig(http=http, cache_dir=str(cache)))


def bytes_under(folder: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize(
    "path",
    ["endless", "endless_in_part", "vast", "negative", "no_number", "endless_number", "long_header", "around", "slow"],
)
def test_a_hostile_server_is_given_up_and_leaves_nothing_on_the_disk(tmp_path: Path, path: str) -> None:
    Hostile.sent = 0
    with serving() as url, pytest.raises((AdapterTooLarge, AdapterUnavailable)):
        make_store(tmp_path, url, timeout_s=2.0).fetch(f"{url}/{path}")  # some are tried again until then
    assert bytes_under(tmp_path) < 64 << 10
    assert Hostile.sent < 64 << 20


def test_a_version_that_cannot_be_asked_for_counts_as_none(tmp_path: Path) -> None:
    with serving() as url:
        assert make_store(tmp_path, url).fetch(f"{url}/odd_version")


UNPRINTABLE = ["\0", "\n", "\x7f", "\x85", "\u2028", "\u202e", "\ud800", "a\udcffb"]


@pytest.mark.parametrize("character", UNPRINTABLE)
@pytest.mark.parametrize("beginning", ["s3://bucket/", "http://127.0.0.1:9/", "hf://org/", "ftp://"])
def test_a_uri_with_what_cannot_be_printed_is_refused_before_anything_is_asked(
    tmp_path: Path, beginning: str, character: str
) -> None:
    with pytest.raises(InvalidRequest, match="cannot be printed") as refused:
        make_store(tmp_path, "http://127.0.0.1:9").fetch(f"{beginning}a{character}b")
    assert refused.value.message.isprintable(), "it is in logs too"


def test_what_comes_compressed_stays_so(tmp_path: Path) -> None:
    with serving() as url:
        store = make_store(tmp_path, url)
        with store.open(f"{url}/zipped") as folder:
            assert {file.read_bytes()[:2] for file in folder.rglob("*") if file.is_file()} == {b"\x1f\x8b"}
    assert bytes_under(tmp_path) < 1 << 20, "each of the files is more than that when unpacked"
