"""Decides who may change a running server through the routes that trainers call.

`--allow-runtime-lora-updating` opens them to everyone who may call routes for loading, and a key with the scope admin
opens them by itself.
"""

from __future__ import annotations

from lorafleet.api.access.caller import Caller
from lorafleet.api.app_state import AppState
from lorafleet.protocol.errors import Forbidden


def check_may_load(state: AppState, caller: Caller) -> None:
    """Raises Forbidden if the caller may not load and unload adapters through the routes of other servers."""
    if not state.config.allow_runtime_lora_updating and "admin" not in caller.scopes:
        raise Forbidden(
            "Loading and unloading adapters at run time is off; start the server with --allow-runtime-lora-updating, "
            "or send a key with the scope admin."
        )


def check_may_control(state: AppState, caller: Caller) -> None:
    """Raises Forbidden if the caller may not pause or flush engines, which concerns the requests of all tenants."""
    if not state.config.allow_runtime_lora_updating and "admin" not in caller.scopes:
        raise Forbidden(
            "Trainers' routes are off; start the server with --allow-runtime-lora-updating, or send the admin key."
        )
    if state.access.gate.has_keys and not caller.is_operator:
        raise Forbidden(
            "This call concerns the requests of all tenants: it requires the operator's key, which "
            "belongs to no tenant."
        )
