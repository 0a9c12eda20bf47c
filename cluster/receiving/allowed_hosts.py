"""Decides at which addresses a replica may meet a trainer's process group, so that no caller makes it connect to
others."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from lorafleet.protocol.errors import Forbidden

_LOCAL = ("localhost", "127.0.0.0/8", "::1")


def check_may_meet(host: str, allowed: Sequence[str]) -> None:
    """Raises Forbidden unless the host is this machine or one that push_hosts allows. Names are compared as text: an
    allowed address does not allow the names that stand for it."""
    if not any(_covers(entry, host) for entry in (*_LOCAL, *allowed)):
        raise Forbidden(
            f"The server does not connect to {host!r}. Start it with --push-hosts {host}, or use an address that it "
            f"allows: {', '.join((*_LOCAL, *allowed))}."
        )


def _covers(entry: str, host: str) -> bool:
    address = _address(host)
    if address is None or (_address(entry) is None and "/" not in entry):
        return entry.lower() == host.lower()
    return address in ipaddress.ip_network(entry)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
