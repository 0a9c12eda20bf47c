from __future__ import annotations

from contextlib import nullcontext

import pytest
import ray

from lorafleet.cluster.config import AppArgs
from lorafleet.cluster.proxy.tls import TLSFiles
from lorafleet.cluster.serve import local, ray_agents
from lorafleet.cluster.serve.local import RAY_STARTS_S, Listener, ray_cpus, start_ray
from lorafleet.protocol.errors import ConfigError

FILES = TLSFiles("/tls/cert.pem", "/tls/key.pem")


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::", "192.0.2.7"])
def test_with_direct_streaming_replicas_and_serves_proxy_stay_on_the_loopback_interface(host: str) -> None:
    options = Listener(host, 8000, FILES, direct_streaming=True).http_options
    assert options == {"host": "127.0.0.1", "port": 8000}, "and speak plain HTTP with HAProxy"


def test_serves_own_proxy_listens_and_has_tls_itself() -> None:
    options = Listener("0.0.0.0", 8000, FILES, direct_streaming=False).http_options
    assert options == {"host": "0.0.0.0", "port": 8000, "ssl_certfile": FILES.cert, "ssl_keyfile": FILES.key}
    assert "ssl_certfile" not in Listener("127.0.0.1", 8000, None, direct_streaming=False).http_options


def test_certificates_of_clients_are_not_asked_for_in_vain() -> None:
    with pytest.raises(ConfigError, match="cannot require certificates of clients"):
        Listener("127.0.0.1", 8000, TLSFiles(FILES.cert, FILES.key, "/tls/ca.pem"), direct_streaming=False)


@pytest.mark.parametrize(
    ("host", "tls", "url"),
    [
        ("0.0.0.0", None, "http://127.0.0.1:8000"),
        ("::", None, "http://[::1]:8000"),
        ("192.0.2.7", FILES, "https://192.0.2.7:8000"),
    ],
)
def test_the_url_that_is_shown_can_be_reached_from_this_machine(host: str, tls: TLSFiles | None, url: str) -> None:
    assert Listener(host, 8000, tls, direct_streaming=True).url == url


LATE = "The current node timed out during startup. This could happen because"


@pytest.mark.parametrize(("cores", "expected"), [(128, 14), (8, 8), (1, 2)])
def test_ray_starts_a_process_ahead_for_each_of_the_servers_and_not_for_each_core(
    monkeypatch: pytest.MonkeyPatch, cores: int, expected: int
) -> None:
    monkeypatch.setattr(local.os, "cpu_count", lambda: cores)
    assert ray_cpus(AppArgs(model="m", num_replicas=4)) == expected


@pytest.mark.parametrize(
    ("said", "starts", "error"),
    [
        ([], 1, None),
        ([LATE], 2, None),
        ([LATE] * len(RAY_STARTS_S), len(RAY_STARTS_S), "too busy"),
        (["no such file"], 1, "no such file"),
        ([LATE, "no such file"], 2, "no such file"),
    ],
    ids=["in time", "late once", "always late", "something else", "late, then something else"],
)
def test_ray_is_started_again_only_where_it_was_late(
    monkeypatch: pytest.MonkeyPatch, said: list[str], starts: int, error: str | None
) -> None:
    seen: list[str] = []

    def init(**_: object) -> None:
        seen.append("start")
        if len(said) >= seen.count("start"):
            raise Exception(said[seen.count("start") - 1])  # Ray's own is no subclass

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray_agents, "keep_agents", lambda: seen.append("keep agents"))
    monkeypatch.setattr(local, "end_descendants", lambda: seen.append("end"))
    with nullcontext() if error is None else pytest.raises(Exception, match=error):
        start_ray(2)
    assert seen.count("start") == starts
    assert seen[0] == "keep agents", "it says how raylets are started"
    assert seen.count("end") == said.count(LATE), "what a late one has started is ended"
