"""Imports public modules by the paths that they had before the folders were ordered by process.

An old path still works in this release: its import returns the module of the new path and warns.
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
# Folders that no longer exist; they must be importable so that their old modules can be found.
OLD_FOLDERS = {"lorafleet.workers.lora"}


def install() -> None:
    """Installs the finder once per process. Python calls it only for modules that no other finder has found."""
    if not any(isinstance(finder, _MovedFinder) for finder in sys.meta_path):
        sys.meta_path.append(_MovedFinder())


class _MovedFinder(MetaPathFinder):
    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        if fullname in OLD_FOLDERS:
            return ModuleSpec(fullname, None, is_package=True)
        return ModuleSpec(fullname, _MovedLoader(NEW_PATHS[fullname])) if fullname in NEW_PATHS else None


class _MovedLoader(Loader):
    """Replaces the module that is being loaded by the module of the new path."""

    def __init__(self, new_path: str) -> None:
        self._new_path = new_path

    def exec_module(self, module: ModuleType) -> None:
        warnings.warn(
            f"{module.__name__} is {self._new_path} now; the old path will be removed in the next release.",
            DeprecationWarning,
            stacklevel=2,
        )
        sys.modules[module.__name__] = importlib.import_module(self._new_path)
