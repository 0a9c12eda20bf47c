"""The stand-in for HAProxy over the configuration that Serve's own code writes, with the real HAProxy."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import stat
import threading
import time
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from lorafleet.cluster.proxy import haproxy, haproxy_config, tls
from lorafleet.cluster.proxy.tls import TLSFiles
from lorafleet.protocol.errors import ConfigError
from tests.cluster.certificates import Authority, serial_seen
from tests.cluster.haproxies import ANSWER_S, running, serves_config
from tests.cluster.sockets import reachable_from_elsewhere


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.make(tmp_path / "ca")


@pytest.fixture(scope="module")
def backend() -> Iterator[int]:
    """The port of a server that answers ok."""

    class Ok(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Ok) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@contextlib.asynccontextmanager
async def renewing(files: TLSFiles, folder: Path) -> AsyncIterator[None]:
    paths = str(folder / "admin.sock"), str(folder / haproxy.PEM_NAME)
    task = asyncio.create_task(tls.keep_renewing(files, *paths, watch_s=0.05))
    await asyncio.sleep(0)
    try:
        yield
    finally:
        task.cancel()


def test_metrics_statistics_and_the_admin_socket_are_for_this_machine_and_user_only(
    backend: int, tmp_path: Path
) -> None:
    with running(tmp_path, [backend], {}) as (pid, port):
        assert reachable_from_elsewhere(pid) == []
        assert stat.S_IMODE(os.stat(tmp_path / "admin.sock").st_mode) == 0o600
        assert httpx.get(f"http://127.0.0.1:{port}/").text == "ok"
    config = serves_config(tmp_path, [backend], port).read_text()
    assert "bind *:" in config, "Serve's own binds all interfaces: else this test sees nothing"


def test_the_ingress_alone_listens_where_it_is_told_to(backend: int, tmp_path: Path) -> None:
    environment = {haproxy.HOST_VARIABLE: "0.0.0.0", haproxy.SOCKET_VARIABLE: str(tmp_path / "in.sock")}
    with running(tmp_path, [backend], environment) as (pid, port):
        [only] = reachable_from_elsewhere(pid)
        assert only.startswith(f"0.0.0.0 {port} ")
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(tmp_path / "in.sock"))) as client:
            assert client.get("http://any/").text == "ok"
        assert stat.S_IMODE(os.stat(tmp_path / "in.sock").st_mode) == 0o600


def test_its_process_group_is_its_own_and_its_session_is_its_managers(backend: int, tmp_path: Path) -> None:
    with running(tmp_path, [backend], {}) as (pid, _):
        assert os.getpgid(pid) == pid != os.getpgrp()
        assert os.getsid(pid) == os.getsid(0)


def test_tls_is_served_and_plain_http_is_not(backend: int, tmp_path: Path, authority: Authority) -> None:
    cert, key = authority.issue("server", "localhost")
    with running(tmp_path, [backend], TLSFiles(str(cert), str(key)).environment()) as (_, port):
        assert httpx.get(f"https://localhost:{port}/", verify=authority.client()).text == "ok"
        assert stat.S_IMODE(os.stat(tmp_path / haproxy.PEM_NAME).st_mode) == 0o600
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://localhost:{port}/").raise_for_status()
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"https://localhost:{port}/")
        old = authority.client()
        old.minimum_version = ssl.TLSVersion.TLSv1_2
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        assert httpx.get(f"https://localhost:{port}/", verify=old).text == "ok"


def test_a_client_needs_a_certificate_where_issuers_are_given(
    backend: int, tmp_path: Path, authority: Authority
) -> None:
    cert, key = authority.issue("server", "localhost")
    files = TLSFiles(str(cert), str(key), str(authority.root))
    stranger = Authority.make(tmp_path / "stranger")
    with running(tmp_path, [backend], files.environment()) as (_, port):
        for shown, welcome in ((authority, True), (stranger, False), (None, False)):
            context = authority.client()
            if shown is not None:
                context.load_cert_chain(*map(str, shown.issue("client", "client@example.org")))
            if welcome:
                assert httpx.get(f"https://localhost:{port}/", verify=context).text == "ok"
            else:
                with pytest.raises(httpx.HTTPError):
                    httpx.get(f"https://localhost:{port}/", verify=context)


async def test_a_renewed_certificate_is_served_without_a_restart(
    backend: int, tmp_path: Path, authority: Authority
) -> None:
    cert, key = authority.issue("server", "localhost")
    files = TLSFiles(str(cert), str(key))
    with running(tmp_path, [backend], files.environment()) as (_, port):

        def seen() -> str:
            return serial_seen(port, authority.client())

        first = await asyncio.to_thread(seen)
        async with renewing(files, tmp_path):
            key.write_text("half of a key")  # as while they are being written: the old one goes on
            assert await asyncio.to_thread(seen) == first
            authority.issue("server", "localhost")
            deadline = time.monotonic() + ANSWER_S
            while await asyncio.to_thread(seen) == first:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)


def test_a_template_of_serves_that_has_changed_is_refused() -> None:
    with pytest.raises(haproxy_config.NotServesTemplate, match="0 times"):
        haproxy_config.edit("frontend http_frontend\n    bind *:8000\n", haproxy_config.Ingress())


def test_an_edited_configuration_stays_as_it_is(backend: int, tmp_path: Path) -> None:
    once = haproxy_config.edit(serves_config(tmp_path, [backend], 8000).read_text(), haproxy_config.Ingress())
    assert haproxy_config.edit(once, haproxy_config.Ingress()) == once


def test_an_address_of_ipv6_is_written_in_brackets() -> None:
    assert haproxy_config.Ingress(host="::1").bind("127.0.0.1", "8000") == "    bind [::1]:8000"


@pytest.mark.parametrize("wrong", ["other key", "no key", "encrypted", "missing"])
def test_files_that_do_not_fit_are_refused_before_anything_starts(wrong: str, authority: Authority) -> None:
    cert, key = authority.issue("server", "localhost")
    if wrong == "other key":
        _, key = authority.issue("other", "localhost")
    elif wrong == "missing":
        key.unlink()
    elif wrong == "encrypted":
        key.write_text(key.read_text().replace("BEGIN EC", "BEGIN ENCRYPTED"))
    else:
        with pytest.raises(ConfigError, match="ssl_keyfile is not given"):
            tls.tls_files(str(cert), None, None)
        return
    with pytest.raises(ConfigError, match="are not a certificate and its key"):
        tls.tls_files(str(cert), str(key), None)
