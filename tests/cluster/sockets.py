"""Which sockets the processes of a server have bound, as the kernel says."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

import psutil

from living import command, family, is_alive


def reachable_from_elsewhere(pid: int) -> list[str]:
    """Of pid and all its descendants: TCP sockets that listen, and UDP sockets, not on the loopback interface alone."""
    found = []
    for process in (psutil.Process(pid), *family(pid)):
        for one in _connections(process, "inet"):
            bound = one.status == psutil.CONN_LISTEN or one.type == socket.SOCK_DGRAM
            if bound and one.laddr and not _is_loopback(one.laddr.ip):
                found.append(f"{one.laddr.ip} {one.laddr.port} of {' '.join(command(process))[-80:]}")
    return found


def listening_ports(process: psutil.Process) -> list[int]:
    """TCP ports of one process."""
    return [one.laddr.port for one in _connections(process, "tcp") if one.status == psutil.CONN_LISTEN]


def _connections(process: psutil.Process, kind: str) -> list[Any]:
    """None where the process has ended. The kernel does not show a zombie's."""
    try:
        return list(process.net_connections(kind))
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        if is_alive(process):
            raise
        return []


def _is_loopback(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback
