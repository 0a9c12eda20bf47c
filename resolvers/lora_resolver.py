"""What a resolver is: something that finds an adapter's files by name when nobody has registered them."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from lorafleet.protocol.lora_request import LoRARequest


@runtime_checkable
class LoRAResolver(Protocol):
    """vLLM's interface. Called on an event loop: whatever blocks goes to a thread."""

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """The adapter called `lora_name` for this base; None where there is none.

        Its lora_path is a folder that every node sees, complete, or a URI that resolvers/store.py opens on each.

        Raises InvalidAdapterName for a name that no adapter can have, and another AdapterError where there is one that
        cannot be read. Whether it can be served is found out when it is loaded.
        """
