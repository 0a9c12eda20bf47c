"""The process groups by which trainers send adapters to this replica. Each has a process (group_program.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict

from lorafleet.cluster.admin.push_intake import PushIntake
from lorafleet.cluster.receiving.allowed_hosts import check_may_meet
from lorafleet.cluster.receiving.receiver_process import ReceiverFailed, ReceiverProcess
from lorafleet.protocol.adapter_formats.announced_tensors import AnnouncedPush
from lorafleet.protocol.errors import BodyTimeout, InvalidRequest, QueueFull
from lorafleet.protocol.weights_group_place import WeightsGroupPlace

MAX_GROUPS = 4
_PROGRAM = "lorafleet.cluster.receiving.group_program"


class UpdateGroups:
    """The groups of one replica, by their names.

    Args:
        allowed_hosts: Hosts besides this machine at which a group may be met.
        device: The GPU that receives over NCCL, or "cpu" if there is none.
    """

    def __init__(self, allowed_hosts: Sequence[str], device: str) -> None:
        self.allowed_hosts = allowed_hosts
        self._device = device
        self._members: dict[str, ReceiverProcess] = {}
        self._changing = asyncio.Lock()

    async def join(self, place: WeightsGroupPlace) -> None:
        """Joins a group that check() allows, in the place of a former one of this name. Returns when all members have
        met. Raises InvalidRequest and QueueFull."""
        member = await self._start(place)
        try:
            await member.wait_until_started(place.timeout_s)
        except ReceiverFailed as error:
            self._forget(place.name, member)
            raise InvalidRequest(
                f"The process group {place.name!r} was not formed at {place.host}:{place.port}: {error}. Start it on "
                "the trainer at the same time, with the same name, `world_size` and `backend`.",
                "group_name",
            ) from None

    def check(self, place: WeightsGroupPlace) -> None:
        """Raises Forbidden if the group is at a host that is not allowed, and InvalidRequest if this replica cannot be
        a member."""
        check_may_meet(place.host, self.allowed_hosts)
        if place.backend == "nccl" and self._device == "cpu":
            raise InvalidRequest("`backend` is nccl, but this server runs without a GPU; use gloo.", "backend")

    async def receive(self, name: str, push: AnnouncedPush, intake: PushIntake, timeout_s: float) -> None:
        """Receives a push's tensors by broadcasts from rank 0, after the pushes before it. If that fails once it has
        begun, the group has ended. Raises BodyTimeout."""
        member = self._members.get(name)
        if member is None:  # It has ended since the push was accepted.
            raise BodyTimeout(f"The process group {name!r} has ended, and nothing was changed: join it again.")
        try:
            await member.receive(push, intake, timeout_s)
        except ReceiverFailed as error:
            rest = "the group has ended: join it again" if member.has_ended else "the group goes on: push again"
            raise BodyTimeout(
                f"The tensors did not arrive in the process group {name!r}: {error}. Nothing was changed, and {rest}."
            ) from None
        finally:
            if member.has_ended:
                self._forget(name, member)

    def has(self, name: str) -> bool:
        """Returns whether this replica is a member of a group, or is joining it."""
        return name in self._members

    async def leave(self, name: str) -> None:
        """Leaves a group, of which this replica must be a member."""
        await self._members.pop(name).end()

    async def close(self) -> None:
        members, self._members = list(self._members.values()), {}
        await asyncio.gather(*(member.end() for member in members))

    async def _start(self, place: WeightsGroupPlace) -> ReceiverProcess:
        async with self._changing:
            former = self._members.pop(place.name, None)
            if former is not None:
                await former.end()
            if len(self._members) >= MAX_GROUPS:
                raise QueueFull(
                    f"This replica is a member of {MAX_GROUPS} process groups; leave one of them with POST "
                    f"/destroy_weights_update_group: {', '.join(self._members)}."
                )
            devices = self._device if place.backend == "nccl" else ""
            member = await ReceiverProcess.start(_PROGRAM, asdict(place), devices)
            self._members[place.name] = member
            return member

    def _forget(self, name: str, member: ReceiverProcess) -> None:
        if self._members.get(name) is member:
            del self._members[name]
