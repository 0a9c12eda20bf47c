"""Everything by which a replica receives tensors that do not come in a request's body."""

from __future__ import annotations

from collections.abc import Sequence

from lorafleet.cluster.receiving.device_readers import DeviceReaders
from lorafleet.cluster.receiving.group_orders import AskMembers
from lorafleet.cluster.receiving.update_groups import UpdateGroups


class TensorReceivers:
    """The receivers of one replica.

    Args:
        push_hosts: Hosts besides this machine at which it may meet a trainer's process group.
        device: UUID of the replica's first GPU, or "cpu" if it has none.
        ask_members: Asks all replicas for the one that is a group's member. None: there is only this one.
    """

    def __init__(
        self, push_hosts: Sequence[str] = (), device: str = "cpu", ask_members: AskMembers | None = None
    ) -> None:
        self.groups = UpdateGroups(push_hosts, device)
        self.devices = DeviceReaders(device)
        self.ask_members = ask_members

    async def close(self) -> None:
        """Ends the processes of all groups and devices."""
        await self.groups.close()
        await self.devices.close()
