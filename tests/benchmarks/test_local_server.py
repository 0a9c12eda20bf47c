import os
import subprocess
import sys
from collections import Counter

import pytest

import local_server
from local_server import LocalServer

HTTP_SERVER = """
import http.server, socketserver, threading
class Other(socketserver.BaseRequestHandler):  # As Serve's gRPC port: it accepts, and does not speak HTTP.
    def handle(self):
        self.request.sendall(b"\\0\\0\\6\\4")
other = socketserver.TCPServer(("127.0.0.1", 0), Other)
threading.Thread(target=other.serve_forever, daemon=True).start()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.end_headers()
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


def test_tokens_are_counted_by_replica_over_all_models(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "lorafleet_engine_generation_tokens_total"
    lines = [
        f"# TYPE {name} counter",
        f'{name}{{job="x",replica="r1",tp_rank="0"}} 30.0',
        f'{name}{{replica="r2"}} 1e3',
        f'{name}{{replica="r1"}} 12',
        'vllm:generation_tokens_total{replica="r1"} 7',
    ]
    monkeypatch.setattr(LocalServer, "_metrics", lambda _: lines)
    assert LocalServer("http://127.0.0.1:1", 1).generated_tokens() == Counter(r1=42, r2=1000)


def test_a_replica_s_own_port_is_the_one_that_answers_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_server, "PROBE_S", 60.0)
    command = [sys.executable, "-c", HTTP_SERVER, "ray::ServeReplica:lorafleet:EngineReplica"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as replica:
        try:
            assert replica.stdout is not None
            port = int(replica.stdout.readline())
            assert LocalServer("http://127.0.0.1:1", os.getpid()).replica_url() == f"http://127.0.0.1:{port}"
        finally:
            replica.kill()
    with pytest.raises(SystemExit, match="no replica of the server"):
        LocalServer("http://127.0.0.1:1", os.getpid()).replica_url()
