"""Servers that stand for replicas and the router behind a real HAProxy: each answers as its test tells it to."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, dict[str, str], bytes | Iterable[bytes]]  # Status, headers, and a body, whole or in chunks.
Handle = Callable[[str, bytes], Answer | None]  # of a path and a body; None breaks the connection


class Toy:
    """port: where it listens. seen: the path and the body of each request but health checks, in their order. is_well:
    what it answers to health checks. is_awake: cleared, it leaves them without an answer."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.seen: list[tuple[str, bytes]] = []
        self.headers: list[dict[str, str]] = []
        self.is_well = True
        self.is_awake = threading.Event()
        self.is_awake.set()
        toy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if self.path == "/-/healthz":
                    toy.is_awake.wait()
                    self._send((200 if toy.is_well else 503, {}, b""))
                else:
                    self.do_POST()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                toy.seen.append((self.path, body))
                toy.headers.append({name.lower(): value for name, value in self.headers.items()})
                answer = toy.handle(self.path, body)
                if answer is None:
                    self.close_connection = True
                else:
                    self._send(answer)

            def _send(self, answer: Answer) -> None:
                status, headers, body = answer
                self.send_response(status)
                if isinstance(body, bytes):
                    headers, chunks = {**headers, "content-length": str(len(body))}, [body]
                else:
                    headers, chunks = (
                        {**headers, "transfer-encoding": "chunked"},
                        map(_chunk, itertools.chain(body, [b""])),
                    )
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                for chunk in chunks:
                    self.wfile.write(chunk)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # HAProxy left: the test's point
        self.port: int = self._server.server_address[1]

    @contextmanager
    def running(self) -> Iterator[Toy]:
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()


def _chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


@contextmanager
def toys(*handles: Handle) -> Iterator[list[Toy]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Toy(handle).running()) for handle in handles]


def saying(text: str, status: int = 200, **headers: str) -> Handle:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda _path, _body: (status, named, text.encode())


def choosing(replica_id: str) -> Handle:
    """What the router answers."""
    return saying(json.dumps({"replica_id": replica_id, "request_headers": {}}))
