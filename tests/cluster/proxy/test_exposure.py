"""What may not be opened to the network without being asked for by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from lorafleet.cluster.config import AppArgs
from lorafleet.cluster.proxy import haproxy
from lorafleet.cluster.proxy.exposure import check_exposure, check_tls
from lorafleet.cluster.proxy.tls import CERT_VARIABLE
from lorafleet.protocol.errors import ConfigError
from tests.cluster.harness import free_port, start_server

TOKEN = {"RAY_AUTH_MODE": "token"}
DEMO = Path(__file__).parents[3] / "demo" / "model"
PUBLIC = ["0.0.0.0", "::", "192.0.2.7", "2001:db8::1", "gpu-17.example.org"]


@pytest.mark.parametrize("host", PUBLIC)
def test_a_public_address_needs_keys_and_rays_token(host: str) -> None:
    with pytest.raises(ConfigError, match=r"no API keys.*`lorafleet keys`.*insecure_without_keys"):
        check_exposure(host, AppArgs(model="m"), TOKEN)
    with_keys = AppArgs(model="m", api_keys="keys.yaml")
    for environment in ({}, {"RAY_AUTH_MODE": "disabled"}):
        with pytest.raises(ConfigError, match=r"RAY_AUTH_MODE=token.*insecure_without_ray_token"):
            check_exposure(host, with_keys, environment)
    check_exposure(host, with_keys, TOKEN)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
def test_the_loopback_interface_needs_neither(host: str) -> None:
    check_exposure(host, AppArgs(model="m"), {})


def test_each_of_the_two_is_overridden_by_its_own_name() -> None:
    without_keys = AppArgs(model="m", insecure_without_keys=True)
    check_exposure("0.0.0.0", without_keys, TOKEN)
    with pytest.raises(ConfigError, match="insecure_without_ray_token"):
        check_exposure("0.0.0.0", without_keys, {})
    check_exposure("0.0.0.0", AppArgs(model="m", api_keys="k", insecure_without_ray_token=True), {})
    with pytest.raises(ConfigError, match="insecure_without_keys"):
        check_exposure("0.0.0.0", AppArgs(model="m", insecure_without_ray_token=True), {})


def test_tls_that_would_not_take_effect_is_refused() -> None:
    ours = {haproxy.RAYS_VARIABLE: f"/opt/venv/bin/{haproxy.NAME}"}
    named = {CERT_VARIABLE: "cert.pem"}
    with pytest.raises(ConfigError, match="HAProxy would not use"):
        check_tls(True, True, ours)
    for direct, environment in ((False, named | ours), (True, named), (True, named | {haproxy.RAYS_VARIABLE: "/x"})):
        with pytest.raises(ConfigError, match="takes effect only with HAProxy"):
            check_tls(False, direct, environment)
    check_tls(False, True, named | ours)
    check_tls(True, False, {})
    check_tls(False, False, {})


def test_a_server_that_would_be_open_to_all_says_how_to_close_it_and_ends(tmp_path: Path) -> None:
    arguments = ["--model", str(DEMO), "--host", "0.0.0.0", "--port", str(free_port())]
    process = start_server(arguments, tmp_path / "serve.log")
    assert process.wait(300) == 1
    printed = (tmp_path / "serve.log").read_text()
    assert "no API keys" in printed and "starting Ray" not in printed and "Traceback" not in printed
