"""The names that resolvers have found. They are held in memory only, and replicas bring them back after a restart."""

from __future__ import annotations

from lorafleet.cluster.catalogue.name_index import NameIndex
from lorafleet.protocol.lora_request import LoRARequest


class FoundNames:
    """The adapters that resolvers have found, by name and by digest."""

    def __init__(self) -> None:
        self.by_name: dict[str, LoRARequest] = {}  # The oldest comes first.
        self.index = NameIndex()
        self._names: dict[str, tuple[str, ...]] = {}  # By digest.

    def __contains__(self, name: str) -> bool:
        return name in self.by_name

    def __len__(self) -> int:
        return len(self.by_name)

    def names_of(self, digest: str) -> tuple[str, ...]:
        return self._names.get(digest, ())

    def add(self, lora: LoRARequest) -> None:
        """Adds an adapter, whose name must be new."""
        self.by_name[lora.lora_name] = lora
        self.index.add(lora.lora_name)
        self._names[lora.digest] = (*self.names_of(lora.digest), lora.lora_name)

    def drop(self, name: str) -> bool:
        """Removes the name, and returns whether it was there."""
        lora = self.by_name.pop(name, None)
        if lora is None:
            return False
        self.index.remove(name)
        others = tuple(other for other in self._names.pop(lora.digest) if other != name)
        if others:
            self._names[lora.digest] = others
        return True
