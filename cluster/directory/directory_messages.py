"""The messages that the directory and its replicas exchange, besides the calls themselves (directory_calls.py)."""

from __future__ import annotations

from typing import Literal

import msgspec

from lorafleet.cluster.catalogue.catalogue_state import Served
from lorafleet.cluster.catalogue.log_end import LogPosition
from lorafleet.protocol.engine_control import EngineControl
from lorafleet.protocol.lora_request import LoRARequest

OrderKind = Literal["load", "pin", "unpin", "drop", "control"]
NO_ADAPTER = LoRARequest("", 1, "")  # The adapter of a control order that concerns none.


class Order(msgspec.Struct, frozen=True):
    """An order to one replica, which answers it with a DoneCall."""

    number: int
    # load: read the adapter into host memory. pin: hold it in a slot. unpin: end that. drop: wait for its in-flight
    # requests, then remove it from every tier. control: carry out `control`.
    kind: OrderKind
    lora: LoRARequest
    control: EngineControl | None = None  # Set for control orders only.


class Changes(msgspec.Struct, frozen=True):
    """The changes that a replica does not know yet, and its orders."""

    epoch: str  # Epoch of the directory process.
    version: int
    served: dict[str, Served | None]  # Names that stand for something else now; None: for nothing.
    orders: tuple[Order, ...] = ()
    log: LogPosition = LogPosition("", 0)  # Position in the log that `served` reflects.


class Found(msgspec.Struct, frozen=True):
    """The answer to a lookup of a name."""

    version: int  # Version of the directory in which the answer holds.
    served: Served | None


class Progress(msgspec.Struct, frozen=True):
    """A step of a replica's start, shown to the person who waits for it."""

    replica_id: str
    text: str
    failed: bool = False


class StaleEpoch(Exception):
    """Raised if the directory was restarted, or no longer knows how far this replica was. The caller joins again, then
    repeats the call."""
