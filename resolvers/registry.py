"""The resolvers, and the order in which they are asked.

A resolver is registered by hand, or found as an installed plugin: an entry point of the group "lorafleet.resolvers"
that makes a resolver without arguments. Sharing downloads and caching misses is left to the caller.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points

from lorafleet.protocol.errors import ConfigError, InvalidAdapterName
from lorafleet.protocol.lora_request import LoRARequest
from lorafleet.resolvers.lora_resolver import LoRAResolver
from lorafleet.resolvers.resolver_metrics import ResolverMetrics

ENTRY_POINT_GROUP = "lorafleet.resolvers"


class LoRAResolverRegistry:
    """The resolvers by name, asked in the order of their registration: the first hit wins."""

    def __init__(self, metrics: ResolverMetrics | None = None) -> None:
        self.metrics = metrics or ResolverMetrics()
        self._resolvers: dict[str, LoRAResolver] = {}

    def register(self, name: str, resolver: LoRAResolver) -> None:
        if name in self._resolvers:
            raise ConfigError(f"two LoRA resolvers are called {name!r}; give one of them another name.")
        self._resolvers[name] = resolver
        self.metrics.expect(name)

    def get(self, name: str) -> LoRAResolver:
        if name not in self._resolvers:
            raise ConfigError(f"there is no LoRA resolver {name!r}; the registered ones are: {self._listed()}.")
        return self._resolvers[name]

    def supported(self) -> list[str]:
        """Returns the resolvers' names, in the order in which they are asked."""
        return list(self._resolvers)

    def load_plugins(self, names: Sequence[str]) -> None:
        """Registers the installed plugins of these names, in this order.

        Raises ConfigError, which names the plugin, if one cannot be registered.
        """
        for name in names:
            self.register(name, _load(name))

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        for name, resolver in self._resolvers.items():
            found = await self._ask(name, resolver, base_model_name, lora_name)
            if found is not None:
                return found
        return None

    async def _ask(self, name: str, resolver: LoRAResolver, base_model_name: str, lora_name: str) -> LoRARequest | None:
        started, outcome = time.monotonic(), "failed"
        try:
            found = await resolver.resolve_lora(base_model_name, lora_name)
            outcome = "absent" if found is None else "found"
            return found
        except InvalidAdapterName:
            outcome = "absent"
            raise
        finally:
            self.metrics.asked(name, outcome, time.monotonic() - started)

    def _listed(self) -> str:
        return ", ".join(self._resolvers) or "none"


def _load(name: str) -> LoRAResolver:
    make = _entry_point(name)
    try:
        resolver = make.load()()
    except Exception as error:  # a third-party package may raise anything on import
        raise ConfigError(f"the LoRA resolver {name!r} ({make.value}) cannot be loaded: {error!r}.") from error
    if not isinstance(resolver, LoRAResolver):
        raise ConfigError(f"the LoRA resolver {name!r} ({make.value}) has no resolve_lora(base_model_name, lora_name).")
    return resolver


def _entry_point(name: str) -> EntryPoint:
    installed = entry_points(group=ENTRY_POINT_GROUP)
    found = [point for point in installed if point.name == name]
    if not found:
        there = ", ".join(sorted(point.name for point in installed)) or "none"
        raise ConfigError(
            f"no LoRA resolver {name!r} is installed (entry points {ENTRY_POINT_GROUP!r}: {there}). Install it."
        )
    if len(found) > 1:
        values = ", ".join(sorted(point.value for point in found))
        raise ConfigError(f"more than one package installs the LoRA resolver {name!r}: {values}. Remove all but one.")
    return found[0]
