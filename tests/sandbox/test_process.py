"""A sandboxed process: what ends it, and that nothing of it is left."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from lorafleet.sandbox.process import SandboxEnded, SandboxLimits, SandboxProcess, command_of

LIMITS = SandboxLimits(cpu_s=0.2, wall_s=0.5, memory_bytes=64 << 20, answer_bytes=100)
PATIENT = SandboxLimits(cpu_s=0.2, wall_s=120, memory_bytes=64 << 20, answer_bytes=100)
BEGIN = "from lorafleet.sandbox.program import serve\n"


def process_of(code: str, limits: SandboxLimits = PATIENT) -> SandboxProcess:
    *python, run, _, folder = command_of("")[:6]
    code = f"import sys; sys.path.insert(0, {folder!r})\n" + code
    assert run.strip().startswith("import runpy")
    return SandboxProcess([*python, code], limits)


@pytest.mark.parametrize(
    ("code", "limits", "words"),
    [
        ("import time; time.sleep(600)", LIMITS, r"longer than 0\.5 s"),
        (BEGIN + "def f(_):\n while True: pass\nserve(f)", PATIENT, r"more than 0\.2 s of processor time"),
        (BEGIN + "serve(lambda _: b'x' * 101)", PATIENT, "returned more than 100 bytes"),
        (BEGIN + "import os; serve(lambda _: os._exit(0))", PATIENT, "crashed the process"),
        (BEGIN + "import os; serve(lambda _: os.abort())", PATIENT, "more than 64 MiB of memory"),
    ],
    ids=["sleeping", "looping", "much", "ending", "aborting"],
)
def test_a_process_that_exceeds_a_limit_says_which_and_leaves_nothing(
    code: str, limits: SandboxLimits, words: str
) -> None:
    before = {child.pid for child in psutil.Process().children()}
    process = process_of(code, limits)
    with pytest.raises(SandboxEnded, match=words):
        process.ask(b"job")
    assert process.has_ended, "by itself"
    assert {child.pid for child in psutil.Process().children()} <= before, "no zombie either"


def test_a_program_reads_no_file_and_gets_no_more_memory() -> None:
    tries = {
        "open('/etc/passwd')": "Too many open files",
        "bytearray(200 << 20)": "MemoryError",
        "__import__('transformers')": "Error",
    }
    code = BEGIN + (
        "import os\n"
        "def f(job):\n"
        "    try: eval(job)\n"
        "    except BaseException as error: return repr(error).encode()[:100]\n"
        "    return b'done'\n"
        "serve(f)"
    )
    process = process_of(code, PATIENT)
    try:
        for job, words in tries.items():
            assert words in process.ask(job.encode()).decode()
        assert process.ask(b"1 + 1") == b"done"
    finally:
        process.end()


def test_a_program_finds_the_packages_that_the_server_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may lie in folders that an isolated interpreter does not have, such as those of PYTHONPATH."""
    (tmp_path / "beside.py").write_text("ANSWER = b'found'\n")
    (tmp_path / "finding.py").write_text("import beside\n" + BEGIN + "serve(lambda _: beside.ANSWER)\n")
    monkeypatch.syspath_prepend(tmp_path)
    process = SandboxProcess(command_of("finding"), PATIENT)
    try:
        assert process.ask(b"job") == b"found"
    finally:
        process.end()


def test_a_program_does_not_import_from_the_servers_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert str(tmp_path) not in command_of("program")
