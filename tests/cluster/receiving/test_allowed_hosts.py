"""The hosts at which a replica meets a trainer's process group."""

from __future__ import annotations

import pytest

from lorafleet.cluster.config import parse_args
from lorafleet.cluster.receiving.allowed_hosts import check_may_meet
from lorafleet.protocol.errors import ConfigError, Forbidden

ALLOWED = ["10.1.0.0/16", "trainer-0", "2001:db8::7"]


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.9.9.9", "localhost", "LOCALHOST", "::1", "10.1.2.3", "Trainer-0", "2001:DB8::7"]
)
def test_this_machine_and_what_is_listed_are_met(host: str) -> None:
    check_may_meet(host, ALLOWED)


@pytest.mark.parametrize(
    "host", ["10.2.0.1", "trainer-1", "2001:db8::8", "0.0.0.0", "::ffff:10.1.2.3", "10.1", "", "169.254.169.254"]
)
def test_all_others_are_not(host: str) -> None:
    with pytest.raises(Forbidden, match="push-hosts"):
        check_may_meet(host, ALLOWED)


@pytest.mark.parametrize("host", ["10.1.2.3/16", "a b", "", "a,b", "x/8", "*", "*.example", "[::1]", "trainer:29500"])
def test_an_entry_that_is_no_host_is_refused_at_the_start(host: str) -> None:
    with pytest.raises(ConfigError, match="push_hosts"):
        parse_args({"model": "m", "push_hosts": [host]})
    for right in ("10.1.0.0/16", "2001:db8::7", "fe80::/10", "trainer_0.example"):
        assert parse_args({"model": "m", "push_hosts": right}).push_hosts == [right]
