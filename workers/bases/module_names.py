"""Converts between the engine's names of modules and those of a family's checkpoints and adapters.

The engine's names are those that most families have: "layers.0.mlp.gate" is a router, and
"layers.0.mlp.experts.3.gate_proj" a projection of one expert. A family with other names has a table of them.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

Pairs = tuple[tuple[str, str], ...]

OF_BASE = "base."  # The engine's name of all tensors of a checkpoint outside of ModuleNames.part.

_EMBEDDING = "embed_tokens"
_IN_LAYER = re.compile(r"((?:model\.)?layers\.[0-9]+\.)(.+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """The names of a family's modules, most of them below a layer.

    A pair has the engine's name and then the family's. It holds for all names that begin with these segments, unless an
    earlier pair does. "*" is an expert's number.
    """

    root: str = "model."  # The beginning of names in published checkpoints and older adapters.
    embedding: str = "embed_tokens"
    newest: Pairs = ()  # Names that the newest transformers gives modules, and adapters made with it.
    older: Pairs = ()  # Names in published checkpoints and in older adapters, where they differ from the newest.
    # For a part of a checkpoint alone: beginnings of the names of its tensors, each with the engine's beginning that
    # takes its place. The first fitting one counts. Other tensors are those of the base, see OF_BASE.
    part: Pairs = ()

    def engine_name(self, name: str) -> str:
        """Returns the engine's name of a module or tensor that has any of its names."""
        if self.part:
            name = next((ours + name[len(theirs) :] for theirs, ours in self.part if name.startswith(theirs)), OF_BASE)
        if name.startswith(self.root):
            name = f"model.{name.removeprefix(self.root)}"
        name = _with_embedding(name, self.embedding, _EMBEDDING)
        return _renamed(name, tuple((theirs, ours) for ours, theirs in self.older + self.newest))

    def name_in_part(self, name: str) -> str:
        """Returns the name in the files of what the engine calls `name`, as far as `part` says it."""
        return next((theirs + name[len(ours) :] for theirs, ours in self.part if name.startswith(ours)), name)

    def own_names(self, name: str) -> tuple[str, ...]:
        """Returns the family's names of what the engine calls `name`: the newest, then the older ones that differ."""
        name = _with_embedding(name, _EMBEDDING, self.embedding)
        found = [_renamed(name, pairs) for pairs in (self.newest, self.older + self.newest)]
        found += [self.root + own.removeprefix("model.") for own in found if own.startswith("model.")]
        return tuple(dict.fromkeys(found))


COMMON_NAMES = ModuleNames()  # Those of families whose names are the engine's.


def _renamed(name: str, pairs: Pairs) -> str:
    """Returns the name with the beginning that the first fitting pair says. Names outside of the layers stay."""
    in_layer = _IN_LAYER.fullmatch(name) if pairs else None
    if in_layer is None:
        return name
    layer, path = in_layer.groups()
    for old, new in pairs:
        found = _beginning(old).match(path)
        if found is not None:
            return f"{layer}{new.replace('*', ''.join(found.groups()))}{path[found.end() :]}"
    return name


def _with_embedding(name: str, old: str, new: str) -> str:
    """Returns the name with the embedding's new name in place of the old one. Others stay."""
    if old == new:
        return name
    root, below = ("model.", name.removeprefix("model.")) if name.startswith("model.") else ("", name)
    head, dot, tail = below.partition(".")
    return f"{root}{new}{dot}{tail}" if head == old else name


@functools.cache
def _beginning(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\*", "([0-9]+)") + r"(?![^.])")
