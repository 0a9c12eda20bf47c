"""Public modules under the paths that they had before the folders were ordered by process.

An old path still works in this release: importing it gives the module of the new path, and warns.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NEW_PATHS = {
    "lorafleet.client.answers": "lorafleet.client.results",
    "lorafleet.client.errors": "lorafleet.client.client_errors",
    "lorafleet.cluster.app": "lorafleet.cluster.serve.app",
    "lorafleet.cluster.ingress": "lorafleet.cluster.proxy.ingress",
    "lorafleet.cluster.proxy_affinity": "lorafleet.cluster.proxy.proxy_affinity",
    "lorafleet.cluster.ray_agents": "lorafleet.cluster.serve.ray_agents",
    "lorafleet.kernels.tune": "lorafleet.kernels.lora.tune",
    "lorafleet.resolvers.base": "lorafleet.resolvers.lora_resolver",
    "lorafleet.workers.config": "lorafleet.protocol.engine_config",
    "lorafleet.workers.errors": "lorafleet.protocol.errors",
    "lorafleet.workers.llm": "lorafleet.offline.llm",
    "lorafleet.workers.lora.request": "lorafleet.protocol.lora_request",
    "lorafleet.workers.sampling_params": "lorafleet.protocol.sampling_params",
    "lorafleet.workers.structured.spec": "lorafleet.protocol.structured_spec",
}
# Folders that are gone, so that the modules that were in them can be looked for.
OLD_FOLDERS = {"lorafleet.workers.lora"}


def install() -> None:
    """Once for a process; it is asked only for modules that are nowhere else."""
    if not any(isinstance(finder, _MovedFinder) for finder in sys.meta_path):
        sys.meta_path.append(_MovedFinder())


class _MovedFinder(MetaPathFinder):
    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        if fullname in OLD_FOLDERS:
            return ModuleSpec(fullname, None, is_package=True)
        return ModuleSpec(fullname, _MovedLoader(NEW_PATHS[fullname])) if fullname in NEW_PATHS else None


class _MovedLoader(Loader):
    """Puts the module of the new path in the place of the one that is loaded."""

    def __init__(self, new_path: str) -> None:
        self._new_path = new_path

    def exec_module(self, module: ModuleType) -> None:
        warnings.warn(
            f"{module.__name__} is {self._new_path} now; the old path will be removed in the next release.",
            DeprecationWarning,
            stacklevel=2,
        )
        sys.modules[module.__name__] = importlib.import_module(self._new_path)
