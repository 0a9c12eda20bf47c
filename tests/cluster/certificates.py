"""A certificate authority of the test's own."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Authority:
    folder: Path
    ca: trustme.CA

    @classmethod
    def make(cls, folder: Path) -> Authority:
        folder.mkdir(exist_ok=True)
        made = cls(folder, trustme.CA())
        made.ca.cert_pem.write_to_path(str(made.root))
        return made

    @property
    def root(self) -> Path:
        return self.folder / "ca.pem"

    def issue(self, name: str, *identities: str) -> tuple[Path, Path]:
        """Certificate and key, in place of those of this name if there are any."""
        issued = self.ca.issue_cert(*identities)
        cert, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        issued.private_key_pem.write_to_path(str(key))
        cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        return cert, key

    def client(self) -> ssl.SSLContext:
        """Trusts this authority only."""
        return ssl.create_default_context(cafile=str(self.root))


def serial_seen(port: int, context: ssl.SSLContext) -> str:
    """Of the certificate that a server on this machine shows to somebody who asks for localhost."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=30) as connection,
        context.wrap_socket(connection, server_hostname="localhost") as tls,
    ):
        shown = tls.getpeercert()
    assert shown is not None
    return str(shown["serialNumber"])
