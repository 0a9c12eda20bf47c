"""Lets a framework's client be imported without the GPU libraries that its other modules import.

Every name in a stubbed package is an empty class, so only code that never uses the package runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar


class StubModule(ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__init__": lambda self, *_, **fields: self.__dict__.update(fields)})
        setattr(self, name, made)
        return made


class StubFinder(MetaPathFinder, Loader):
    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        is_stub = any(name == package or name.startswith(f"{package}.") for package in self._packages)
        return ModuleSpec(name, self, is_package=True) if is_stub else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def stub(*packages: str) -> None:
    """Stubs these packages, whether they are installed or not."""
    sys.meta_path.insert(0, StubFinder(packages))
