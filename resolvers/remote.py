"""Finds adapters at a URI made from their name: in S3, on a web server, on a hub.

An adapter is returned with that URI and its digest, not with a path. So every node can open it, and none mistakes
other bytes for it.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Collection

from lorafleet.protocol.errors import Forbidden, InvalidRequest
from lorafleet.protocol.lora_request import LoRARequest, adapter_number
from lorafleet.protocol.names import check_adapter_name
from lorafleet.resolvers.store import AdapterStore
from lorafleet.resolvers.trained_base import is_for_base


class RemoteResolver:
    """Finds adapters at remote URIs.

    Args:
        template: A URI with {lora_name} and, optionally, {base_model_name}.
        base_model_names: Further names of the served base, such as its path.
    """

    def __init__(self, template: str, store: AdapterStore, base_model_names: Collection[str] = ()) -> None:
        self._template = template
        self._store = store
        self._base_model_names = frozenset(base_model_names)

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        check_adapter_name(lora_name)
        if "@" in lora_name and self._template.startswith("hf://"):
            return None  # the operator chooses the revision, since anybody may open a pull request on a hub
        uri = self._template.format(base_model_name=base_model_name.strip("/"), lora_name=lora_name)

        def accept(config: bytes) -> bool:
            return is_for_base(config, lora_name, base_model_name, self._base_model_names)

        try:
            find = functools.partial(self._store.find, uri, accept=accept)
            digest = await asyncio.get_running_loop().run_in_executor(self._store.pool, find)
        except (Forbidden, InvalidRequest):  # a name whose URI is not allowed names no adapter
            return None
        if digest is None:
            return None
        return LoRARequest(lora_name, adapter_number(lora_name), uri, digest, base_model_name)
