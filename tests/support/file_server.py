"""Provides a web server over files in memory, whose faults a test can set."""

from __future__ import annotations

import base64
import hashlib
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

DATE = "Sat, 21 Nov 2026 06:00:00 GMT"


class FileServer:
    """Serves files from memory over HTTP, with settings that a test may change at any time."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}  # Contents by path, such as "/a/b".
        self.redirects: dict[str, str] = {}  # Maps a path to a URL.
        # Maps a path to (status, body); it takes precedence over all else.
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.ranges = self.etags = True  # Whether the server supports these.
        self.dates = self.digests = False  # Whether the server sends these.
        self.cut_after_bytes: int | None = None  # The connection is closed after this many bytes of each answer's body.
        self.failures = 0  # The number of next requests that get a 503.
        self.headers: dict[str, str] = {}  # Headers of answers that are not files.
        self.num_bytes = 0
        self.requests: list[tuple[str, dict[str, str]]] = []  # The path and the headers of each request.
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def put(self, folder: str, files: dict[str, bytes]) -> str:
        """Adds the files to the folder, and returns its URL."""
        self.files |= {f"{folder}/{name}": data for name, data in files.items()}
        return self.url + folder

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                server.requests.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
                server._answer(self)

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        if self.failures > 0:
            self.failures -= 1
            _send(request, 503, self.headers, b"")
        elif path in self.answers:
            _send(request, self.answers[path][0], self.headers, self.answers[path][1])
        elif path in self.redirects:
            _send(request, 302, {"location": self.redirects[path]}, b"")
        elif path not in self.files:
            _send(request, 404, self.headers, b"")
        else:
            self._send_file(request, self.files[path])

    def _send_file(self, request: BaseHTTPRequestHandler, data: bytes) -> None:
        headers = {}
        if self.etags:
            headers["etag"] = f'"{hashlib.sha1(data).hexdigest()}"'
            if request.headers.get("if-match", headers["etag"]) != headers["etag"]:
                _send(request, 412, {}, b"")
                return
        if self.dates:
            headers["last-modified"] = DATE
        if self.digests:
            headers["repr-digest"] = f"sha-256=:{base64.b64encode(hashlib.sha256(data).digest()).decode()}:"
        status, body = 200, data
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("range", ""))
        if self.ranges and wanted is not None:
            start, end = int(wanted[1]), min(int(wanted[2]), len(data) - 1)
            status, body = 206, data[start : end + 1]
            headers["content-range"] = f"bytes {start}-{end}/{len(data)}"
        cut = self.cut_after_bytes
        self.num_bytes += len(body) if cut is None else min(cut, len(body))
        _send(request, status, headers, body, cut)


def _send(
    request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes, cut: int | None = None
) -> None:
    request.send_response(status)
    for name, value in headers.items():
        request.send_header(name, value)
    request.send_header("content-length", str(len(body)))
    request.end_headers()
    request.wfile.write(body[:cut])
    if cut is not None and cut < len(body):
        request.close_connection = True
