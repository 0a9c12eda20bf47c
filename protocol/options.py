"""Describes options as metadata of their types, so that each is declared once.

A class of options is a frozen dataclass with fields such as `block_size: Annotated[int, Option("…")] = 16`. It has no
slots, since pydantic finds a default as an attribute of the class. The YAML and flags of a server (cluster/config.py)
and the parameters of LLM (offline/llm.py) are derived from its fields.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args, get_type_hints

from lorafleet.protocol.errors import ConfigError
from lorafleet.protocol.limits import Range

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")

MEMORY_GIB = Range(0, 1 << 20)  # Sizes of memory that options may have. A larger one would overflow what allocates it.


class Change(enum.Enum):
    """Marks an option that a deploy changes without replacing replicas. It is metadata of the option's type.

    An option without a mark belongs to what a replica is built from: a change of it replaces all replicas.
    """

    IN_REPLICA = "Running replicas take the new value."
    BY_SERVE = "Ray Serve takes the new value, or only the deploy itself reads it."


@dataclass(frozen=True, slots=True)
class Option:
    description: str  # Its help text.
    bounds: Range | None = None  # The range of a number that is checked by the class that declares the option.

    def __get_pydantic_json_schema__(
        self, schema: object, handler: Callable[[object], dict[str, Any]]
    ) -> dict[str, Any]:
        """Adds the description to the JSON schema of a pydantic model that inherits the option."""
        return handler(schema) | {"description": self.description}


def at_least(low: int) -> Range:
    return Range(low, math.inf)


def check_gib(name: str, value: Any) -> None:
    """Raises ConfigError if the value of an option in GiB is not in MEMORY_GIB. `name` may have the prefix `lora.`"""
    if type(value) not in (int, float) or value not in MEMORY_GIB:
        raise ConfigError(
            f"{name}={value!r} must be a number of GiB in {MEMORY_GIB}. Set such a number.", name.removeprefix("lora.")
        )


def enough_gib(num_bytes: int) -> str:
    """Returns the fewest thousandths of a GiB that hold so many bytes, as a number that an option takes."""
    return f"{-(-num_bytes * 1000 // 2**30) / 1000:.3f}"


def options_of(kind: type) -> Mapping[str, Option]:
    """Returns the options that a class declares or inherits, by name."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: entry for name, hint in hints.items() for entry in get_args(hint) if isinstance(entry, Option)}


def values_of(kind: type[T], source: T) -> dict[str, Any]:
    """Returns the values that `source` has for the options of `kind`, by name."""
    return {name: getattr(source, name) for name in options_of(kind)}


class BoundedValue(NamedTuple):
    name: str
    value: Any
    bounds: Range
    is_optional: bool  # Its default is None.


def bounded_values(config: DataclassInstance) -> Iterator[BoundedValue]:
    """Yields the values whose options have bounds, but no default that is None."""
    options = options_of(type(config))
    for field in fields(config):
        bounds, value = options[field.name].bounds if field.name in options else None, getattr(config, field.name)
        if bounds is not None and not (value is None and field.default is None):
            yield BoundedValue(field.name, value, bounds, field.default is None)
