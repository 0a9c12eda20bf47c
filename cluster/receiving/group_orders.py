"""Orders of a replica for the one that is the member of a trainer's process group. All replicas are asked at once."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from lorafleet.cluster.replica_search import find_answer
from lorafleet.protocol.adapter_formats.announced_tensors import AnnouncedPush
from lorafleet.protocol.admin_answers import Adapter
from lorafleet.protocol.admin_verbs import PushTerms
from lorafleet.protocol.errors import LorafleetError, Overloaded

PATIENCE_S = 600.0  # A push waits until replicas have loaded the adapter.

logger = logging.getLogger("lorafleet.cluster")


@dataclass(frozen=True, slots=True)
class GroupPush:
    """Receives a push in a group, and serves it."""

    group: str
    name: str  # The adapter's full name.
    push: AnnouncedPush
    terms: PushTerms
    timeout_s: float


@dataclass(frozen=True, slots=True)
class GroupLeave:
    """Has the member leave its group."""

    group: str


@dataclass(frozen=True, slots=True)
class GroupDone:
    """The answer of the replica that is the group's member."""

    digest: str = ""  # The digest of the pushed version.
    adapter: Adapter | None = None  # The pushed adapter.
    error: LorafleetError | None = None  # Why the order has failed. None: it is done.


GroupOrder = GroupPush | GroupLeave
AskMembers = Callable[[GroupOrder], Awaitable[GroupDone | None]]


async def ask_members(replicas: Any, order: GroupOrder) -> GroupDone | None:
    """Returns the answer of the replica that is the group's member, or None if all replicas say that they are not.

    `replicas` is a handle whose deployment has obey_group_order(). Raises the member's error, and Overloaded if a
    replica does not answer.
    """
    done, error = await find_answer(replicas, "obey_group_order", order, GroupDone, PATIENCE_S)
    if done is not None and done.error is not None:
        raise done.error
    if done is None and error is not None:
        logger.warning("a replica did not say whether it is in the process group %r: %r", order.group, error)
        raise Overloaded("A replica that may be in this process group does not answer; try again in a moment.")
    return done
