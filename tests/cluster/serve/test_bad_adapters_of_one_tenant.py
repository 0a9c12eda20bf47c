"""Every damaged, hostile or unsupported adapter, one after another, against the running server, while another request
runs beside it: each is a 4xx that names the cause, soon, at little cost, with no code run, and changes nobody's answer.

The tables are those of tests/workers/adapters/bad_adapters/; here each goes the whole way, through a resolver, as any
client can ask for it, and through /v1/load_lora_adapter.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from living import command
from lorafleet.api.answer.error_responses import TABLE
from lorafleet.protocol.adapter_formats.adapter_files import TICK_S
from lorafleet.protocol.limits import MAX_MODEL_CHARS
from tests.cluster.one_replica import OneReplica
from tests.workers.adapters.bad_adapters.cases import CASES
from tests.workers.adapters.bad_adapters.damage import CANARY, SECRET

pytestmark = pytest.mark.xdist_group("one_replica")
WALL_S = 60.0  # a refusal takes some hundredths of a second; what is meant here would take minutes
CPU_S = 20.0  # of all processes together, for the same adapter twice and the neighbor's tokens
READ_BYTES = 48 << 20  # by all of them, sockets included
GROWTH_BYTES = 192 << 20  # of any one of them, at its peak


@dataclass(frozen=True, slots=True)
class Spent:
    """By one process since it began."""

    cpu_s: float
    read_bytes: int
    rss_bytes: int

    @classmethod
    def of(cls, process: psutil.Process) -> Spent | None:
        """None: the process has ended."""
        try:
            times = process.cpu_times()
            return cls(times.user + times.system, process.io_counters().read_chars, process.memory_info().rss)
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # a zombie's counters may not be read
            return None


class Cost:
    """What the server's processes spend within the block. A HAProxy or an idle Ray worker may end meanwhile, as they
    do; the replica and its worker may not."""

    def __init__(self, server: OneReplica) -> None:
        self._server = server

    def __enter__(self) -> Cost:
        self._before = {p: spent for p in self._server.processes() if (spent := Spent.of(p))}
        for process in self._before:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # the peak counts from here
        return self

    def __exit__(self, *_: object) -> None:
        self.cpu_s, self.read_bytes, self.growth_bytes, stayed = 0.0, 0, 0, ""
        for process, before in self._before.items():
            name, peak_bytes, after = " ".join(command(process)), _peak_bytes(process.pid), Spent.of(process)
            if after is None or peak_bytes is None:
                continue
            self.cpu_s += after.cpu_s - before.cpu_s
            self.read_bytes += after.read_bytes - before.read_bytes
            self.growth_bytes = max(self.growth_bytes, peak_bytes - before.rss_bytes)
            stayed += name
        assert all(name in stayed for name in ("EngineReplica", "WorkerActor", "DirectoryActor")), stayed.split()


def _peak_bytes(pid: int) -> int | None:
    """None: the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return next((int(one.split()[1]) << 10 for one in lines if one.startswith("VmHWM:")), None)


@pytest.fixture(scope="module")
def undisturbed(one_replica: OneReplica) -> Any:
    return one_replica.neighbor()


@pytest.fixture
def beside(one_replica: OneReplica, undisturbed: Any) -> Iterator[None]:
    """A neighbor's request runs through the test, and gets the answer that it always gets."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(one_replica.neighbor)
        yield
        tokens, logprobs = answer.result()
    assert tokens == undisturbed[0]
    assert logprobs == pytest.approx(undisturbed[1], abs=1e-5)


def check_refused(answer: httpx.Response, code: str, words: str) -> None:
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert (error["code"], words in error["message"]) == (code, True), error
    assert SECRET not in answer.text
    assert len(answer.content) < 1500
    assert not CANARY.exists()


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("case", CASES)
def test_a_bad_adapter_is_refused_by_name_and_changes_nothing(one_replica: OneReplica, case: str) -> None:
    damage, error, words = CASES[case]
    name = f"case-{list(CASES).index(case)}"
    adapter = one_replica.copy(name)
    damage(adapter)
    started_s = time.monotonic()
    with Cost(one_replica) as cost:
        resolved = one_replica.ask(name)
        loaded = one_replica.load(f"loaded-{name}", str(adapter.path))
    assert time.monotonic() - started_s < WALL_S
    assert cost.cpu_s < CPU_S
    assert cost.read_bytes < READ_BYTES
    assert cost.growth_bytes < GROWTH_BYTES
    code = TABLE[error].code
    assert code is not None
    check_refused(loaded, code, words)
    if resolved.status_code == 404:  # no folder, or none with a config: the resolver knows no such adapter
        assert code == "adapter_missing" or resolved.json()["error"]["code"] == code
    else:
        check_refused(resolved, code, words)


# -- files that change --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("beside")
def test_bytes_swapped_under_a_name_are_one_version_or_the_other(one_replica: OneReplica) -> None:
    def text(name: str) -> str:
        return one_replica.ask(name, max_tokens=8).json()["choices"][0]["text"]

    adapter = one_replica.copy("swapped")
    adapter.map(lambda k, v: (k, v * 3))
    old = text("swapped")
    adapter.map(lambda k, v: (k, -v if "lora_B" in k else v))
    shutil.copytree(adapter.path, one_replica.folder / "swapped-new")
    new = text("swapped-new")
    for number in range(4):  # others take its places in memory
        other = one_replica.copy(f"other-{number}")
        other.map(lambda k, v: (k, v * (2 + number)))  # noqa: B023  # it is called in this turn
        assert one_replica.ask(other.path.name).status_code == 200
    answer = one_replica.ask("swapped", max_tokens=8)
    if answer.status_code == 200:
        assert answer.json()["choices"][0]["text"] in (old, new)
    else:
        assert answer.json()["error"]["code"] == "adapter_changed", answer.text


@pytest.mark.usefixtures("beside")
def test_a_file_that_is_written_all_the_time_is_one_version_or_an_error(one_replica: OneReplica) -> None:
    """While its writer goes on, that is: nobody can tell a half that stays for a while from a file that is whole."""
    adapter, stop = one_replica.copy("written"), threading.Event()
    path = adapter.path / "adapter_model.safetensors"
    stayed_half: list[tuple[float, float]] = []
    one = path.read_bytes()
    adapter.map(lambda k, v: (k, -v if "lora_B" in k else v))
    other = path.read_bytes()

    def write() -> None:
        while not stop.is_set():
            for data in (one, other):
                with path.open("r+b") as file:
                    file.write(data[: len(data) // 2])
                    half_s = time.monotonic()
                    file.flush()
                    file.write(data[len(data) // 2 :])
                    file.flush()
                    if time.monotonic() - half_s > TICK_S / 2:  # the system gave the processor to others
                        stayed_half.append((half_s, time.monotonic()))

    def load(number: int) -> tuple[httpx.Response, float, float]:
        began_s = time.monotonic()
        answer = one_replica.load(f"written-{number}", str(adapter.path))
        return answer, began_s, time.monotonic()

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        answers = [load(number) for number in range(8)]
        stop.set()
        writing.result()
    whole = set()
    for data in (one, other):
        path.write_bytes(data)
        name = f"whole-{len(whole)}"
        assert one_replica.load(name, str(adapter.path)).status_code == 200
        whole.add(one_replica.ask(name, max_tokens=8).json()["choices"][0]["text"])
    for number, (answer, began_s, ended_s) in enumerate(answers):
        if any(start_s < ended_s and began_s < end_s for start_s, end_s in stayed_half):
            continue
        if answer.status_code == 200:
            assert one_replica.ask(f"written-{number}", max_tokens=8).json()["choices"][0]["text"] in whole
        else:
            assert answer.json()["error"]["code"] in ("adapter_changed", "adapter_malformed"), answer.text


# -- values that are finite and absurd ----------------------------------------------------------------------------


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0, "seed": 1}, {"temperature": 0.7, "top_p": 0.5, "top_k": 3}], ids=str
)
def test_an_adapter_whose_logits_are_nan_answers_itself_alone(
    one_replica: OneReplica, sampling: dict[str, Any]
) -> None:
    name = f"absurd-{len(sampling)}"
    one_replica.copy(name).map(lambda k, v: (k, v * 1e30))
    answer = one_replica.ask(name, max_tokens=12, logprobs=1, **sampling)
    assert answer.status_code == 200
    assert json.loads(answer.text)["usage"]["completion_tokens"] == 12


# -- names --------------------------------------------------------------------------------------------------------

NAMES = {
    "up": "../good",
    "up from within": "a/../../good",
    "absolute": "/etc",
    "here": "./good",
    "a double slash": "a//good",
    "hidden": ".git",
    "backslashes": "..\\..\\etc",
    "a NUL": "good\x00",
    "encoded": "%2e%2e%2fgood",
    "encoded NUL": "good%00",
    "encoded twice": "%252e%252e%252fgood",
    "Cyrillic": "g\u043e\u043ed",
    "wide": "\uff47\uff4f\uff4f\uff44",
    "a zero-width joiner": "go\u200dod",
    "right to left": "\u202egood",
    "combining": "good\u0301",
    "a line feed": "good\n",
    "an escape": "\x1b[31mgood",
    "10 kB": "a" * 10_000,
    "a megabyte": "a" * 10**6,
    "a blank": " ",
    "an option": "--help",
    "a list": "a,b=c",
    "a URL": "http://127.0.0.1/x",
    "a file URL": "file:///etc/passwd",
    "the base's": "tiny",
}


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("case", NAMES)
def test_a_name_that_no_adapter_can_have_finds_nothing_and_registers_nothing(
    one_replica: OneReplica, case: str
) -> None:
    name = NAMES[case]
    with Cost(one_replica) as cost:
        loaded = one_replica.load(name, str(one_replica.good.path))
        asked = None if case == "the base's" else one_replica.ask(name)
    is_field_bounded = len(name) > MAX_MODEL_CHARS  # Such a text is refused before it is looked at as a name.
    refusal = (400, None) if is_field_bounded else (400, "invalid_adapter_name")
    assert (loaded.status_code, loaded.json()["error"]["code"]) == refusal, loaded.text
    if asked is not None:
        refusal = (400, None) if is_field_bounded else (404, "model_not_found")
        assert (asked.status_code, asked.json()["error"]["code"]) == refusal, asked.text
    assert cost.cpu_s < CPU_S
    listed = [model["id"] for model in httpx.get(f"{one_replica.url}/v1/models", timeout=300).json()["data"]]
    assert name not in listed or case == "the base's"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/..%2f..%2fetc%2fpasswd",
        "/v1/models/%2e%2e/%2e%2e/etc/passwd",
        "/v1/models/good%00",
        "/v1/models/%5c..%5cgood",
        "/v1/models/" + "a" * 8000,
        "/v1/models/%ff%fe",
    ],
    ids=lambda path: path[:40],
)
def test_a_name_in_a_path_is_no_way_out_either(one_replica: OneReplica, path: str) -> None:
    host, port = one_replica.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=300) as raw:  # httpx would tidy the path
        raw.sendall(f"GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: raw.recv(65536), b"")).decode()
    assert " 404 " in answer.splitlines()[0] or " 400 " in answer.splitlines()[0]
    assert "root:" not in answer


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize(
    "path",
    [
        *(
            "",
            "/",
            "/dev",
            "/dev/zero",
            "/proc/self",
            "/etc/passwd",
            "../../../etc",
            "a\x00b",
            "x" * 10_000,
            "/" * 5000,
        ),
        *("http://169.254.169.254/latest/", "https://example.com/x", "file:///etc", "hf://a/b", "ftp://x/y", "s3://"),
    ],
    ids=lambda path: repr(path)[:30],
)
def test_a_path_without_an_adapter_is_refused_whatever_it_is(one_replica: OneReplica, path: str) -> None:
    with Cost(one_replica) as cost:
        answer = one_replica.load("stray", path)
    assert 400 <= answer.status_code < 500, answer.text
    assert len(answer.content) < 1500
    assert cost.cpu_s < CPU_S
    assert one_replica.ask("stray").status_code == 404


# -- languages of their own ---------------------------------------------------------------------------------------

ENDLESS = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}" + "{% endfor %}" * 3
TEMPLATES = {
    "without end": (ENDLESS, "processor time"),
    "a gigabyte": ("{{ 'a' * 10**9 }}", "memory"),
    "much text": ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "characters"),
    "no template": ("{% for %}", "cannot be compiled"),
    "out of the sandbox": (f"{{{{ cycler.__init__.__globals__.os.system('touch {CANARY}') }}}}", "unsafe"),
    "of 50 MB": ("a" * (50 << 20), "at most"),
}


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("case", TEMPLATES)
def test_a_hostile_chat_template_fails_its_own_requests_alone(one_replica: OneReplica, case: str) -> None:
    source, words = TEMPLATES[case]
    name = f"template-{list(TEMPLATES).index(case)}"
    (one_replica.copy(name).path / "chat_template.jinja").write_text(source)
    body = {"model": name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    started_s = time.monotonic()
    answer = httpx.post(f"{one_replica.url}/v1/chat/completions", json=body, timeout=300)
    assert time.monotonic() - started_s < WALL_S
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]
    assert len(answer.content) < 1500
    assert not CANARY.exists()


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"tokenizer.json": "{" * 1000}, "tokenizer"),
        ({"tokenizer.json": "x" * (65 << 20)}, "at most"),
        ({"tokenizer.json": "{}", "tokenizer_config.json": '{"auto_map": {"AutoTokenizer": "evil.T"}}'}, "auto_map"),
        ({"tokenizer_config.json": '{"chat_template": 7}'}, "chat_template"),
        ({"tokenizer.json": '{"model": {"type": "BPE", "vocab": {"a": 4294967295}, "merges": []}}'}, "4294967295"),
        ({"tokenizer.json": "{}", "special_tokens_map.json": '{"tokenizer_file": "/etc/passwd"}'}, "tokenizer_file"),
    ],
    ids=["no JSON", "65 MB", "code", "a number for a template", "an id of u32", "a path for a token"],
)
def test_a_hostile_tokenizer_is_refused_by_name(one_replica: OneReplica, content: dict[str, str], words: str) -> None:
    name = f"tokenizer-{words}-{len(content)}".replace(" ", "-")
    folder = one_replica.copy(name).path
    for file, text in content.items():
        (folder / file).write_text(text)
    (folder / "evil.py").write_text(f"import os\nos.system('touch {CANARY}')\n")
    answer = one_replica.ask(name)
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]
    assert not CANARY.exists()
