"""A server of one replica, and what tests ask of it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from living import command, family
from tests.workers.conftest import AdapterDir


@dataclass(frozen=True, slots=True)
class OneReplica:
    """See serve/conftest.py."""

    url: str
    pid: int
    log: Path
    folder: Path  # the resolver's
    good: AdapterDir

    def ask(self, model: str, **fields: Any) -> httpx.Response:
        body = {"model": model, "prompt": [5, 6, 7, 8], "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        return httpx.post(f"{self.url}/v1/completions", json=body | fields, timeout=300)

    def load(self, name: str, path: str) -> httpx.Response:
        body = {"lora_name": name, "lora_path": path}
        return httpx.post(f"{self.url}/v1/load_lora_adapter", json=body, timeout=300)

    def neighbor(self) -> Any:
        answer = self.ask("good", max_tokens=24, logprobs=1, return_token_ids=True).json()["choices"][0]
        return answer["token_ids"], answer["logprobs"]["token_logprobs"]

    def copy(self, name: str) -> AdapterDir:
        shutil.copytree(self.good.path, self.folder / name)
        return AdapterDir(self.folder / name)

    def processes(self) -> list[psutil.Process]:
        """Those that adapters' bytes come near to, and the proxy."""
        return [p for p in family(self.pid) if any(name in " ".join(command(p)) for name in ("ray::", "haproxy"))]
