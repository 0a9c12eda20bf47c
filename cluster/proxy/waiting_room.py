"""Lets requests wait at HAProxy while their application has no replica, instead of rejecting them: while the only
replica is replaced, or another one starts in its place. waiting_room.lua does the waiting.

Probes and metrics do not wait, since they ask whether there is a replica. Requests beyond the bounds get 429.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lorafleet.cluster.proxy.haproxy_answers import replica_starts

PROGRAM = Path(__file__).with_suffix(".lua")
SOCKET_NAME = "next.sock"  # It lies beside the configuration.
EXPECTED_S = 60  # Until a start of replicas has been seen.
ONWARD = "onward"  # Name of the backend that leads to the HAProxy that has taken over.
WAITED_HEADER = "x-lorafleet-waited-ms"
NOT_WAITING_PATHS = ("/health", "/health_generate", "/liveness", "/ping", "/version", "/metrics")

_BACKEND = re.compile(r"^    use_backend (\S+) if is_\1$", re.MULTILINE)
_FIRST_CHOICE = re.compile(r"^    use_backend ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class WaitingRoom:
    """The bounds of what waits in one HAProxy. Each request holds one or two buffers of ROUTED_BODY_BYTES there. What
    does not fit into them stays with the client."""

    socket: str = SOCKET_NAME  # Path of the socket that leads to the HAProxy that has taken over.
    max_requests: int = 512
    max_per_address: int = 256  # Of one address of clients.
    max_per_key: int = 128  # Of one API key.
    wait_s: int = 180  # Longest time that a request waits.
    expected_s: int = EXPECTED_S  # Retry-After of what is rejected: how long an application last had no replica.

    def add_to(self, config: str, *, twin: str, condition: str) -> str:
        """Returns the configuration of HAProxy with the rules by which requests wait.

        Args:
            twin: Suffix of the name of an application's second backend, in which a server may still be up.
            condition: HAProxy's condition for requests that may wait.
        """
        backends = _BACKEND.findall(config)
        if not backends:  # Serve has not named an application yet.
            return config
        rules = "\n".join(self._rules(backends, twin, condition))
        named = re.compile(rf"^    acl is_{re.escape(backends[-1])} path \S+$", re.MULTILINE)
        config = named.sub(lambda line: f"{line[0]}\n{rules}", config, count=1)
        config = _FIRST_CHOICE.sub(rf"    use_backend {ONWARD} if onward\n\g<0>", config, count=1)
        config = config.replace("\ndefaults\n", f'\n    lua-load "{PROGRAM}"\ndefaults\n', 1)
        frontend = "\nfrontend http_frontend\n"
        config = config.replace(frontend, f"{frontend}    bind unix@{self.socket} mode 600\n", 1)
        return f"{config.rstrip()}\nbackend {ONWARD}\n    server self unix@{self.socket}\n"

    def _rules(self, backends: Sequence[str], twin: str, condition: str) -> list[str]:
        bounds = f"{self.max_requests} {self.max_per_address} {self.max_per_key} {self.wait_s} {WAITED_HEADER}"
        rules = [  # Only processes of this user reach the sockets, whose connections have no address.
            f"    http-request del-header {WAITED_HEADER} if {{ src -m found }}",
            f"    acl asks_for_state path {' '.join(NOT_WAITING_PATHS)}",
            "    acl onward var(txn.onward) -m found",
        ]
        for name in backends:
            has_none = f"{{ var(txn.app) -m str {name} }} {{ nbsrv({name}) eq 0 }} {{ nbsrv({name}{twin}) eq 0 }}"
            may_wait = f"{has_none} !asks_for_state{condition}"
            rules += [
                f"    http-request set-var(txn.app) str({name}) if is_{name} !{{ var(txn.app) -m found }}",
                f"    http-request lua.wait_for_replica {name},{name}{twin} {bounds} if {may_wait}",
            ]
        answer = replica_starts(self.expected_s).rule()
        return [*rules, f"    http-request return {answer} if {{ var(txn.no_room) -m found }}"]
