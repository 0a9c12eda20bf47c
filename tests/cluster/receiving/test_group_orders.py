"""An order for a process group reaches the replica that is its member, and brings that replica's answer or error."""

from __future__ import annotations

from typing import Any

import pytest

from answering_replicas import AnsweringReplicas
from lorafleet.cluster.receiving.group_orders import GroupDone, GroupPush, ask_members
from lorafleet.protocol.adapter_formats.announced_tensors import AnnouncedPush, read_announced
from lorafleet.protocol.admin_verbs import PushTerms
from lorafleet.protocol.errors import BodyTimeout, Overloaded

PUSH = AnnouncedPush(b"{}", read_announced([{"name": "a", "dtype": "float32", "shape": [2]}]))
ORDER = GroupPush("group", "policy", PUSH, PushTerms("distributed"), 60.0)


def replicas(answers: list[Any]) -> AnsweringReplicas:
    return AnsweringReplicas("obey_group_order", ORDER, answers)


async def test_the_member_answers() -> None:
    assert await ask_members(replicas([None, GroupDone("digest"), RuntimeError("gone")]), ORDER) == GroupDone("digest")
    assert await ask_members(replicas([None, None]), ORDER) is None


async def test_the_members_error_is_the_orders() -> None:
    with pytest.raises(BodyTimeout, match="did not arrive"):
        await ask_members(replicas([None, GroupDone(error=BodyTimeout("did not arrive"))]), ORDER)


@pytest.mark.parametrize("answers", [[None, RuntimeError("gone")], []])
async def test_a_silent_replica_may_be_the_member(answers: list[Any]) -> None:
    with pytest.raises(Overloaded, match="does not answer"):
        await ask_members(replicas(answers), ORDER)
