"""Manages the ingress's certificate and key: finds them, checks that they match, and activates a renewed
certificate.

HAProxy takes a new certificate through its admin socket, and connections in flight stay. Nothing here depends on
Ray.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lorafleet.api.access.work_threads import on_duty
from lorafleet.protocol.errors import ConfigError

CERT_VARIABLE = "LORAFLEET_SSL_CERTFILE"
KEY_VARIABLE = "LORAFLEET_SSL_KEYFILE"
CA_VARIABLE = "LORAFLEET_SSL_CA_CERTS"
WATCH_S = 5.0  # Seconds between two checks whether the files have changed.

logger = logging.getLogger("lorafleet.cluster")


@dataclass(frozen=True, slots=True)
class TLSFiles:
    """The paths of the PEM files for TLS."""

    cert: str  # The server's own certificate, then those of its issuers.
    key: str
    ca_certs: str | None = None  # Clients must show a certificate of one of these; None accepts any client.

    def check(self) -> None:
        """Raises ConfigError if the files cannot be read or do not belong together."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.cert, self.key, _no_password)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"ssl_certfile={self.cert!r} and ssl_keyfile={self.key!r} are not a certificate and its key: {error}. "
                "Give PEM files: the certificate before those of its issuers, and the key without a password."
            ) from None
        if self.ca_certs is not None:
            try:
                context.load_verify_locations(self.ca_certs)
            except OSError as error:
                raise ConfigError(f"ssl_ca_certs={self.ca_certs!r} contains no certificates: {error}.") from None

    def pem(self) -> str:
        """Returns certificate and key as one text, without empty lines, since one would end it on HAProxy's admin
        socket. Raises ConfigError."""
        self.check()
        lines = [*Path(self.cert).read_text().splitlines(), *Path(self.key).read_text().splitlines()]
        return "".join(f"{line}\n" for line in lines if line.strip())

    def own_context(self) -> ssl.SSLContext:
        """Returns a context for the server's own client, which checks that the server answers. It trusts this
        certificate alone, whatever its names are."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.load_verify_locations(self.cert)
        return context

    def environment(self) -> dict[str, str]:
        """Returns the variables that files_from_environment() reads."""
        values = {CERT_VARIABLE: self.cert, KEY_VARIABLE: self.key, CA_VARIABLE: self.ca_certs}
        return {name: value for name, value in values.items() if value is not None}


def tls_files(cert: str | None, key: str | None, ca_certs: str | None) -> TLSFiles | None:
    """Returns the files of three settings; None if none is set. Raises ConfigError if one is missing or a file is
    wrong."""
    if cert is None and key is None and ca_certs is None:
        return None
    if cert is None or key is None:
        missing = "ssl_certfile" if cert is None else "ssl_keyfile"
        raise ConfigError(f"TLS needs a certificate and its key, but {missing} is not given.")
    clients = None if ca_certs is None else os.path.abspath(ca_certs)
    files = TLSFiles(os.path.abspath(cert), os.path.abspath(key), clients)
    for path in (files.cert, files.key, files.ca_certs or files.cert):
        if " " in path:
            raise ConfigError(f"{path!r} contains a space, which HAProxy's configuration does not allow; rename it.")
    files.check()
    return files


def files_from_environment(environment: Mapping[str, str]) -> TLSFiles | None:
    return tls_files(*(environment.get(name) for name in (CERT_VARIABLE, KEY_VARIABLE, CA_VARIABLE)))


async def keep_renewing(files: TLSFiles, admin_socket: str, name: str, watch_s: float = WATCH_S) -> None:
    """Gives HAProxy the certificate again whenever its files change. `name` is the file from which HAProxy read it.
    Never returns."""
    known = _stamp(files)
    while True:
        await asyncio.sleep(watch_s)
        stamp = _stamp(files)
        if stamp == known:
            continue
        try:
            pem = await on_duty(files.pem)
            await _renew(pem, admin_socket, name)
        except (ConfigError, OSError) as error:
            # Perhaps only one of the two files is written yet, so this is tried again.
            logger.warning("the ingress keeps its old certificate: %s", error)
            continue
        known = stamp
        logger.info("the ingress has a new certificate from %s", files.cert)


async def _renew(pem: str, admin_socket: str, name: str) -> None:
    answer = await _ask(admin_socket, f"set ssl cert {name} <<\n{pem}\n")
    if "Transaction" not in answer:
        raise OSError(f"HAProxy rejects the new one: {answer.strip()}")
    answer = await _ask(admin_socket, f"commit ssl cert {name}\n")
    if "Success" not in answer:
        raise OSError(f"HAProxy cannot activate the new one: {answer.strip()}")


async def _ask(admin_socket: str, command: str) -> str:
    reader, writer = await asyncio.open_unix_connection(admin_socket)
    try:
        writer.write(command.encode())
        await writer.drain()
        return (await reader.read()).decode()
    finally:
        writer.close()


def _stamp(files: TLSFiles) -> tuple[int, ...]:
    """Returns the times when the files last changed, in nanoseconds, or zeros while one is missing."""
    try:
        return tuple(os.stat(path).st_mtime_ns for path in (files.cert, files.key))
    except OSError:
        return (0, 0)


def _no_password() -> str:
    raise ValueError("the key is encrypted")
