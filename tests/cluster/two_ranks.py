"""A server whose replica has two ranks."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Any

from otlp_receiver import Receiver
from tests.cluster.certificates import Authority
from tests.cluster.harness import descendants_named

KINDS = ("all", "qv", "large")  # of the adapters that it is started with


@dataclass(frozen=True, slots=True)
class TwoRanks:
    """See conftest.py. Without an authority it has no TLS."""

    url: str
    pid: int
    authority: Authority | None = None
    collector: Receiver | None = None

    @property
    def verify(self) -> ssl.SSLContext | bool:
        """Returns the certificates that a client must trust, for httpx."""
        return True if self.authority is None else self.authority.client()

    def processes(self, name: str) -> list[int]:
        return descendants_named(self.pid, name)


def arguments_of_two_ranks(made: Any, device: str) -> list[str]:
    """made: tests/conftest.py's fleet of one model."""
    arguments = ["--model", str(made.base), "--served-model-name", "tiny", "--device", device, "--tp", "2"]
    arguments += ["--fully-sharded-loras", "--allow-runtime-lora-updating"]
    arguments += ["--lora-modules", *(f"{kind}={made.adapters[kind]}" for kind in KINDS), "--max-loras", "2"]
    return [*arguments, "--kv-cache-tokens", "4096", "--max-num-batched-tokens", "32", "--max-num-seqs", "8"]
