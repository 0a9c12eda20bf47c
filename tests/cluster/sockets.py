"""Which sockets the processes of a server have bound, as the kernel says."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

import psutil


def reachable_from_elsewhere(pid: int) -> list[str]:
    """Of pid and all its descendants: TCP sockets that listen, and UDP sockets, not on the loopback interface alone."""
    found = []
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended: it listens nowhere
            for one in process.net_connections("inet"):
                bound = one.status == psutil.CONN_LISTEN or one.type == socket.SOCK_DGRAM
                if bound and one.laddr and not _is_loopback(one.laddr.ip):
                    found.append(f"{one.laddr.ip} {one.laddr.port} of {' '.join(process.cmdline())[-80:]}")
    return found


def listening_ports(pid: int) -> list[int]:
    """TCP ports of one process."""
    return [one.laddr.port for one in psutil.Process(pid).net_connections("tcp") if one.status == psutil.CONN_LISTEN]


def _is_loopback(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback
