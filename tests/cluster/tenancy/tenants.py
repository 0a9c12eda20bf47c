"""A server of several tenants, which the tests of this folder share."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import openai

from tests.cluster.harness import RunningServer

REPLICAS, RUNNING, WAITING = 2, 2, 1  # Sequences that run and that wait are counted for each replica.


@dataclass(frozen=True, slots=True)
class Tenants:
    server: RunningServer
    folder: Path
    keys: dict[str, str]  # by the key's name

    def client(self, key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.server.url}/v1", api_key=self.keys[key], max_retries=0, timeout=120)

    def lorafleet(self, *arguments: str, key: str = "") -> str:
        return lorafleet(*arguments, LORAFLEET_URL=self.server.url, LORAFLEET_ADMIN_KEY=self.keys.get(key, ""))


def lorafleet(*arguments: str, **environment: str) -> str:
    program = "from lorafleet.cluster.cli.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
