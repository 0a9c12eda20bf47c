"""The interface of a resolver, which finds the files of an adapter by its name if the adapter is not registered."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from lorafleet.protocol.lora_request import LoRARequest


@runtime_checkable
class LoRAResolver(Protocol):
    """A resolver with vLLM's interface. It is called on an event loop, so it must do blocking work in a thread."""

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """Returns the adapter called `lora_name` for this base, or None if there is none.

        Its lora_path is a complete folder that every node sees, or a URI that resolvers/store.py opens on each node.

        Raises InvalidAdapterName for a name that no adapter can have, and another AdapterError if the adapter exists
        but cannot be read. Loading it shows whether it can be served.
        """
