"""The calls by which a server joins and leaves a trainer's process group, as SGLang's routes."""

from __future__ import annotations

import msgspec

from lorafleet.protocol.admin_verbs import HttpRoute, Verb
from lorafleet.protocol.weights_group_place import GroupBackend


class GroupAnswer(msgspec.Struct, frozen=True):
    success: bool
    message: str


class JoinWeightsGroup(Verb[GroupAnswer], frozen=True):
    http = HttpRoute("POST", "/init_weights_update_group", "Join a trainer's process group")

    group_name: str
    master_address: str
    master_port: int
    rank_offset: int  # The server's rank.
    world_size: int
    backend: GroupBackend
    timeout_s: float


class LeaveWeightsGroup(Verb[GroupAnswer], frozen=True):
    http = HttpRoute("POST", "/destroy_weights_update_group", "Leave a trainer's process group")

    group_name: str
