"""Rejects requests from web pages of other sites to a server that needs no key.

A browser on the same machine or network can reach such a server, so any page that it shows could use it. The browser
sends the site of the page in `Origin`, and the name under which it found the server in `Host`. A page whose own name
is made to resolve to this machine (DNS rebinding) has a matching Origin, but not a Host that only this machine has.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from lorafleet.protocol.errors import Forbidden
from lorafleet.protocol.limits import cut

ANY = "*"
_BROWSER = "Mozilla/"  # Part of the User-Agent of every browser.


@dataclass(frozen=True, slots=True)
class Origins:
    allowed: tuple[str, ...] = ()  # Such as https://app.example.org; "*" allows the pages of all sites.
    only_loopback: bool = True  # The server listens on the loopback interface only, so other names are not its own.

    def check(self, headers: Headers) -> None:
        """Raises Forbidden if another site's page sent the request. Programs send no Origin, and may send no Host."""
        if ANY in self.allowed:
            return
        origin, host = headers.get("origin"), headers.get("host")
        if origin is not None and origin not in self.allowed and _place(origin) != (host or "").lower():
            raise Forbidden(
                f"A page of {cut(origin)!r} may not use this server, because the server ({cut(host or '')!r}) "
                "requires no API key. Start the server with --allowed-origins and that origin to allow its pages, or "
                "with --api-keys."
            )
        if host is not None and self.only_loopback and not self._is_own(host):
            raise Forbidden(
                "This server listens on the loopback interface and requires no API key, so it rejects requests for "
                f"the host {cut(host)!r}. Send requests to localhost or to the server's address, start the server "
                "with --allowed-origins and the origin of that name (http://NAME:PORT), or with --api-keys."
            )

    def check_change(self, headers: Headers) -> None:
        """Raises Forbidden if a browser sent a GET that changes something. Pages of other sites can make a browser do
        so, for example with an image, and such a request has no Origin."""
        if ANY in self.allowed:
            return
        if any(header.startswith("sec-fetch-") for header in headers) or _BROWSER in headers.get("user-agent", ""):
            raise Forbidden(
                "A browser may not change this server with a GET, because any page can make it send one, and the "
                "server requires no API key. Send a POST to the same path."
            )

    def _is_own(self, host: str) -> bool:
        name = _name_of(host)
        return (
            name == "localhost"
            or name.endswith(".localhost")
            or _is_address(name)
            or any(host.lower() == _place(origin) for origin in self.allowed)
        )


def _name_of(host: str) -> str:
    """Returns the host without its port, or "" if it is malformed, such as an unclosed bracket."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _place(origin: str) -> str:
    return origin.partition("://")[2].lower()


def _is_address(name: str) -> bool:
    """Returns whether the host is an IP address, which is safe because rebinding needs a name."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
