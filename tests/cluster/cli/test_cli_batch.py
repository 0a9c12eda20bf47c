"""`lorafleet run-batch` as a process: killed at any moment, it is run again and answers each line exactly once."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from living import is_alive
from lorafleet.cluster.cli import batch_server
from lorafleet.cluster.cli.batch_server import BatchServer, flags
from lorafleet.cluster.cli.cli import app
from lorafleet.cluster.config import parse_args
from lorafleet.protocol.errors import LorafleetError

PROGRAM = "from lorafleet.cluster.cli.cli import main; main()"
NUM_LINES = 60
DEADLINE_S = 120.0


class ScriptedServer(ThreadingHTTPServer):
    """Answers `left` requests, and holds all others. The first attempt of each third line is refused."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), ScriptedAnswers)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.asked: Counter[str] = Counter()
        self.num_answered = 0
        self.left = 0
        self.keys: set[str | None] = set()
        self.changed = threading.Condition()

    def handle_error(self, *_: object) -> None:
        """Says nothing of clients that are gone."""

    def allow(self, count: int) -> None:
        with self.changed:
            self.left = count
            self.changed.notify_all()

    def wait_until_all_are_answered(self) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.left == 0, DEADLINE_S)


class ScriptedAnswers(BaseHTTPRequestHandler):
    server: ScriptedServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        prompt, server = body["prompt"], self.server
        with server.changed:
            server.keys.add(self.headers["authorization"])
            server.asked[prompt] += 1
            if server.asked[prompt] == 1 and int(prompt) % 3 == 0:
                self._send(429, {"error": {}}, "0")
                return
            server.changed.wait_for(lambda: server.left > 0)
            server.left -= 1
            server.changed.notify_all()
        self._send(200, {"prompt": prompt, "model": body["model"]})

    def _send(self, status: int, content: object, retry_after: str | None = None) -> None:
        encoded = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(encoded)))
        if retry_after is not None:
            self.send_header("retry-after", retry_after)
        self.end_headers()
        self.wfile.write(encoded)

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@pytest.fixture
def scripted() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.allow(10**6)
    server.shutdown()
    thread.join()
    server.server_close()


def write_input(path: Path) -> None:
    lines = [
        {
            "custom_id": f"id {i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "sql" if i % 2 else "llama", "prompt": str(i)},
        }
        for i in range(NUM_LINES)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def start(folder: Path, url: str) -> subprocess.Popen[str]:
    places = ["-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl")]
    command = [sys.executable, "-c", PROGRAM, "run-batch", *places, "--url", url, "--api-key", "k"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_a_batch_that_is_killed_three_times_answers_each_line_once(tmp_path: Path, scripted: ScriptedServer):
    write_input(tmp_path / "in.jsonl")
    for count in (1, 17, 25):
        process = start(tmp_path, scripted.url)
        scripted.allow(count)
        scripted.wait_until_all_are_answered()  # the process may or may not have written the last of them
        process.kill()
        process.communicate()
        assert not (tmp_path / "out.jsonl").exists()
    process = start(tmp_path, scripted.url)
    scripted.allow(10**6)
    _, printed = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, printed) == (0, f"{NUM_LINES} lines answered, 0 of them with errors\n")
    answers = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert Counter(answer["custom_id"] for answer in answers) == {f"id {i}": 1 for i in range(NUM_LINES)}
    for answer in answers:
        number = int(answer["custom_id"][3:])
        model = "sql" if number % 2 else "llama"
        assert answer["response"]["body"] == {"prompt": str(number), "model": model}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    assert scripted.keys == {"Bearer k"}


def test_ctrl_c_says_how_to_go_on(tmp_path: Path, scripted: ScriptedServer):
    write_input(tmp_path / "in.jsonl")
    process = start(tmp_path, scripted.url)
    scripted.allow(5)
    scripted.wait_until_all_are_answered()
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, printed) == (130, "lorafleet: stopped; run the same command again to go on\n")
    assert (tmp_path / "out.jsonl.partial").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-o", "out"], "--model"),
        (["-o", "out", "--url", "http://x", "--max-loras", "2"], "--max-loras does not apply"),
        (["-o", "out", "--url", "localhost:8000"], "must begin with http"),
        (["-o", "in", "--url", "http://x"], "different files"),
        (["-o", "out", "--error-file", "./out", "--url", "http://x"], "different files"),
        (["-o", "out", "--url", "http://x"], "cannot be read"),
        (["-o", "s3://b", "--url", "http://x"], "names no object"),
    ],
)
def test_a_mistake_is_reported_before_anything_is_sent(tmp_path: Path, monkeypatch, arguments: list[str], words: str):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["run-batch", "-i", "in", *arguments])
    assert result.exit_code == 1
    assert words in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_server_gets_the_options_as_they_were_given():
    options = {"model": "m", "lora_modules": ["a=/a", "b=/b"], "enforce_eager": True, "enable_lora": True}
    given = flags(options)
    expected = ["--model", "m", "--lora-modules", "a=/a", "--lora-modules", "b=/b", "--enforce-eager", "--enable-lora"]
    assert given == expected
    assert flags({"enable_lora": False}) == ["--no-enable-lora"]
    assert parse_args(options).lora_modules[1].name == "b"


def test_a_server_of_the_batch_ends_with_it(monkeypatch):
    monkeypatch.setattr(batch_server, "PROGRAM", "import time; print('ready: x', flush=True); time.sleep(600)")
    with BatchServer({}) as server:
        server.check()
        process = psutil.Process(server._process.pid)
    assert not is_alive(process)
    with pytest.raises(LorafleetError, match="has ended"):
        server.check()
    monkeypatch.setattr(batch_server, "PROGRAM", "raise SystemExit(3)")
    with pytest.raises(LorafleetError, match="status 3"), BatchServer({}):
        pass


def test_a_server_of_a_batch_that_is_killed_ends_too():
    program = """
import time
from lorafleet.cluster.cli import batch_server
batch_server.PROGRAM = "import time; print('ready: x', flush=True); time.sleep(600)"
with batch_server.BatchServer({}) as server:
    print(server._process.pid, flush=True)
    time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    server = psutil.Process(int(process.stdout.readline()))
    assert is_alive(server)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + DEADLINE_S
    while is_alive(server) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(server)
