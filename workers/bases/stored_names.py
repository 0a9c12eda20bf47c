"""Translates the names of a checkpoint's tensors to those that transformers' class for the whole model writes.

Tools leave wrappers in the names, a decoder that was saved without its head lacks the first segment, and a tied table
may be stored under the head's name alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

HEAD_WEIGHT, EMBEDDING_WEIGHT = "lm_head.weight", "model.embed_tokens.weight"
# What torch.compile, FSDP, activation checkpointing and DistributedDataParallel insert into names.
_INSIDE = r"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
_WRAPPERS = re.compile(rf"^(?:module\.|{_INSIDE})+|{_INSIDE}")
# Beginnings of names in checkpoints of a decoder that was saved without its head, for texts alone and beside pictures.
_OF_DECODER = ("layers.", "language_model.layers.")


@dataclass(frozen=True, slots=True)
class StoredNames:
    """The differences between the names in the files and those that the class writes."""

    root: str = ""  # What the files leave out before all names that do not begin as `kept` says.
    kept: tuple[str, ...] = ()
    # Names of the head's weight, which is the embedding's as well, and the embedding's own name. Nothing: they are not.
    lone_heads: tuple[str, ...] = ()
    embedding: str = ""

    def written(self, name: str) -> str:
        """Returns the name that the class writes for the tensor that the files call `name`."""
        name = without_wrappers(name)
        if name in self.lone_heads:
            return self.embedding
        return name if not self.root or name.startswith(self.kept) else self.root + name


AS_WRITTEN = StoredNames()  # Those of checkpoints with the class's own names, apart from wrappers.


def without_wrappers(name: str) -> str:
    return _WRAPPERS.sub("", name)


def names_in_files(names: Iterable[str], root: str, kept: tuple[str, ...]) -> StoredNames:
    """Returns the translation for files with these names.

    Args:
        names: Names without wrappers.
        root: The beginning that transformers gives names of the family's decoder, such as "model.".
        kept: Beginnings of names outside of the decoder.
    """
    own = list(names)
    has_root = any(name.startswith((root, "model.", "language_model.model.")) for name in own)
    if has_root or not any(name.startswith(_OF_DECODER) for name in own):
        return AS_WRITTEN
    return StoredNames(root, ("lm_head.", "language_model.lm_head.", *kept))
