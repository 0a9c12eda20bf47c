"""Lets a part call its owner without a reference cycle, which would keep the owner until Python collects it."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar
from weakref import WeakMethod

P = ParamSpec("P")
R = TypeVar("R")


def weak(method: Callable[P, R]) -> Callable[P, R]:
    """Returns a function that calls the bound method, but does not keep its object. The object must outlive all
    calls, as an owner outlives its parts."""
    reference: WeakMethod[Callable[P, R]] = WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = reference()
        assert bound is not None, "the owner is gone"
        return bound(*args, **kwargs)

    return call
