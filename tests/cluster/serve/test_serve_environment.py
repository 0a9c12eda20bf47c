from __future__ import annotations

import socket
import subprocess
import sys
from textwrap import dedent

from lorafleet.cluster.serve import serve_environment


def test_two_servers_on_one_machine_take_different_replica_ports():
    # A port that is taken, by whoever, rules out its whole range.
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        assert not serve_environment._is_free(taken.getsockname()[1])
    with socket.socket() as replica:
        replica.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        replica.bind(("127.0.0.1", 0))
        replica.listen()
        assert not serve_environment._is_free(replica.getsockname()[1])
    held = serve_environment._hold_range()
    assert not serve_environment._is_free(held), "long before a replica listens there"


def test_a_proxy_has_as_long_to_begin_as_the_start_waits_for_it():
    told = """
        from lorafleet.cluster.serve import serve_environment
        serve_environment.prepare("/tmp/x", direct_streaming=False)
        from ray.serve._private import constants
        print(constants.PROXY_READY_CHECK_TIMEOUT_S * constants.PROXY_HEALTH_CHECK_UNHEALTHY_THRESHOLD)
        print(constants.HTTP_PROXY_TIMEOUT)
    """
    done = subprocess.run([sys.executable, "-c", dedent(told)], capture_output=True, text=True, check=True)
    until_it_is_killed_s, until_the_start_fails_s = map(float, done.stdout.split())
    assert until_it_is_killed_s >= until_the_start_fails_s
