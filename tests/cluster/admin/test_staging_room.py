"""What pushes have in the temporary folder is counted before it is written, and no tenant takes it all."""

from __future__ import annotations

import pytest

from lorafleet.cluster.admin.staging_room import StagingRoom
from lorafleet.protocol.errors import QueueFull, StoreRefused


def test_a_tenant_takes_at_most_half_of_what_others_leave_free() -> None:
    room = StagingRoom(lambda: 1000)
    with room.staging("~acme/one") as first, room.staging("~acme/two") as second, room.staging("~rival/one") as rival:
        first.add(300)
        with pytest.raises(QueueFull, match="needs 201 bytes in the server's temporary folder, besides 300"):
            second.add(201)
        second.add(200)
        with pytest.raises(StoreRefused, match="at most 250 are allowed, since 500 are free"):
            rival.add(251)
        rival.add(250)
        first.remove(300)
        second.add(100)
    with room.staging("~rival/one") as rival:
        rival.add(500)


def test_adapters_without_a_tenant_may_take_all_that_is_free_but_no_more() -> None:
    room = StagingRoom(lambda: 1000)
    with room.staging("public") as own:
        own.add(1000)
        with pytest.raises(QueueFull):
            own.add(1)
    with room.staging("public") as own, pytest.raises(StoreRefused, match="set TMPDIR"):
        own.add(1001)


def test_what_a_push_took_is_free_again_however_it_ends() -> None:
    room = StagingRoom(lambda: 1000)

    def fail() -> None:
        with room.staging("~acme/one") as staged:
            staged.add(500)
            raise RuntimeError

    for _ in range(3):
        with pytest.raises(RuntimeError):
            fail()
