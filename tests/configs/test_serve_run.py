"""`serve run` of a shipped file, with the environment that `lorafleet config environment` prints. It has a Ray of its
own, which ends with it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest import mock

import httpx
import pytest

from lorafleet.cluster.serve import cluster_environment, serve_environment
from tests.cluster.harness import START_S, free_port, stop_server

pytestmark = pytest.mark.xdist_group("own_server")
ROOT = Path(__file__).parents[2]
OBJECT_STORE_BYTES = 80 << 20  # Ray's least
RAY_IS_LATE = "timed out during startup"  # Ray's words when its processes take longer than its 30 s.
RAY_STARTS = 4


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    run_dir = tempfile.mkdtemp(prefix="lf-", dir="/tmp")  # Unix sockets' paths are short
    with mock.patch.dict(os.environ):
        serve_environment.prepare(run_dir, direct_streaming=True)  # ports and files that no other server here has
        made = os.environ | cluster_environment.environment()
    yield made | {
        "RAY_ADDRESS": "local",  # nobody else's Ray
        "RAY_TMPDIR": run_dir,
        "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(OBJECT_STORE_BYTES),
        "LORAFLEET_STATE_DIR": f"{run_dir}/state",
        "LORAFLEET_RUN_DIR": run_dir,
    }
    shutil.rmtree(run_dir, ignore_errors=True)


@contextlib.contextmanager
def serve_run(file: Path, environment: Mapping[str, str], url: str, log_file: Path) -> Iterator[None]:
    """In the repository's root, as the file says, and again where Ray was late."""
    command = [Path(sys.executable).with_name("serve"), "run", file]
    for _ in range(RAY_STARTS):
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, cwd=ROOT, env=environment
            )
        try:
            served = is_served(url, process)
            if served:
                yield
        finally:
            stop_server(process, signal.SIGINT)
        if served or RAY_IS_LATE not in log_file.read_text():
            break
    assert served, log_file.read_text()


def is_served(url: str, process: subprocess.Popen[bytes]) -> bool:
    """Whether an answer comes; HAProxy hears of replicas after they are up."""
    deadline_s = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline_s:
        with contextlib.suppress(httpx.TransportError):
            if ask(url, "demo").status_code == 200:
                return True
        time.sleep(0.2)
    return False


def ask(url: str, model: str) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "What colour is a lime?"}], "max_tokens": 16, "temperature": 0}
    return httpx.post(f"{url}/v1/chat/completions", json=body | {"model": model}, timeout=60)


def test_the_demos_file_is_served(environment: dict[str, str], tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    shipped = (ROOT / "configs" / "demo.yaml").read_text()
    file = tmp_path / "demo.yaml"
    file.write_text(shipped.replace("port: 8000", f"port: {port}"))
    assert file.read_text() != shipped
    with serve_run(file, environment, url, tmp_path / "serve.log"):
        for model, said in (("demo", "A lime is green."), ("shout", "A LIME IS GREEN.")):
            assert ask(url, model).json()["choices"][0]["message"]["content"] == said
