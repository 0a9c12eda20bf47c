from __future__ import annotations

import socket

from lorafleet.cluster import serve_environment


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
