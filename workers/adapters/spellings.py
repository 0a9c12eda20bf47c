"""Lists the names under which transformers and PEFT have known a module of a decoder.

The same layer is "model.layers.0" in a text model, "model.language_model.layers.0" in a model with a part for pictures,
"language_model.model.layers.0" in the same model before transformers 4.52, and "layers.0" or "language_model.layers.0"
in models without a head. An adapter's patterns were matched against the names of the class that it was trained with.
The names of its tensors show which class that was.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_HEAD = "lm_head"
# What classes of transformers have put before a decoder's own names, such as "layers.0.mlp.down_proj".
ROOTS = ("model.", "model.language_model.", "language_model.model.", "language_model.", "")
_ROOT_OF_OLD_HEAD = "language_model.model."

# What PEFT puts before a name. Tools that save a model that is wrapped already double it.
_PEFT_PREFIX = re.compile(r"(?:base_model\.model\.)*+")
# What torch.compile, FSDP and activation checkpointing insert anywhere, and DDP, DeepSpeed and Lightning at the
# beginning.
_WRAPPER = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\.")
_OUTER_WRAPPER = re.compile(r"^((?:base_model\.model\.)*+)(?:module\.)++")


@dataclass(frozen=True, slots=True)
class Spelled:
    """The names of one module in PEFT's patterns."""

    own: tuple[str, ...]  # in the class that the adapter was trained with; a family's newest and older ones
    served: tuple[str, ...] = ()  # in the base's class, into which PEFT converts the adapter's names when it loads it
    others: tuple[str, ...] = ()  # in other classes that have the module

    @property
    def name(self) -> str:
        """The name in the adapter's own class."""
        return self.own[0]

    @property
    def foreign(self) -> tuple[str, ...]:
        return self.served + self.others

    @property
    def all(self) -> tuple[str, ...]:
        return self.own + self.foreign

    def beginning_with(self, name: str | None) -> Spelled:
        """Returns the same with `name`, which the file has, as the first of the class's own."""
        if name is None or name == self.own[0]:
            return self
        return Spelled(*_distinct((name, *self.own), self.served, self.others))

    def of_parameter(self, name: str) -> Spelled:
        """Returns the names of a parameter of the module."""
        own, served, others = (
            tuple(f"{module}.{name}" for module in names) for names in (self.own, self.served, self.others)
        )
        return Spelled(own, served, others)


@dataclass(frozen=True, slots=True)
class Roots:
    """The beginnings of modules' names in each class, divided as in `Spelled`."""

    own: str = "model."
    served: tuple[str, ...] = ()
    others: tuple[str, ...] = ROOTS

    @classmethod
    def of(cls, served: str, published: str, own: str | None) -> Roots:
        """Returns the roots of an adapter.

        Args:
            served: the root in the base's class.
            published: the root that the base's family has in checkpoints and older adapters.
            own: the root in the adapter's file; None if it is unknown.
        """
        first = served if own is None else own
        is_converted = served == "model.language_model." or first == published
        return cls(first, (served,) if is_converted else (), (published, *ROOTS))

    def spell(self, names: tuple[str, ...]) -> Spelled:
        """Returns the names of a module, given those that it has below the root."""
        own = [_below(self.own, name) for name in names]
        served = [_below(root, name) for root in self.served for name in names]
        others = [_below(root, name) for root in self.others for name in names]
        if _HEAD in names:
            others.append(_below(_ROOT_OF_OLD_HEAD, _HEAD))
        return Spelled(*_distinct(own, served, others))


ROOTS_OF_TEXT = Roots()


def root_in_file(name: str, module: str, published: str) -> str | None:
    """Returns the beginning of the module's name in the file, before its own name; None if PEFT did not write it.

    `published` is a root that only the base's family has.
    """
    if not name.startswith("base_model.model."):
        return None
    inner = known_name(name)
    root = inner.removesuffix(module)
    return root if inner.endswith(module) and root in (*ROOTS, published) else None


def without_wrappers(name: str) -> str:
    """Returns the tensor's name without what wrappers of the model have put into it."""
    return _OUTER_WRAPPER.sub(r"\1", _WRAPPER.sub("", name))


def known_name(module: str) -> str:
    """Returns the name by which PEFT's patterns knew a module, given its name in the file without wrappers."""
    return _PEFT_PREFIX.sub("", module, count=1)


def table_names(table: str) -> tuple[str, ...]:
    """Returns the names of the embedding or the head in all classes."""
    return ROOTS_OF_TEXT.spell((table,)).all


def _below(root: str, name: str) -> str:
    """Returns the module's name in a class. The head lies beside the decoder."""
    if name != _HEAD:
        return root + name
    return "language_model.lm_head" if root == _ROOT_OF_OLD_HEAD else _HEAD


def _distinct(*groups: Sequence[str]) -> list[tuple[str, ...]]:
    """Returns the groups without names that occur before."""
    seen: dict[str, None] = {}
    found: list[tuple[str, ...]] = []
    for group in groups:
        new = tuple(dict.fromkeys(name for name in group if name not in seen))
        seen.update(dict.fromkeys(new))
        found.append(new)
    return found
