"""Converts one adapter, or a mixture of several, to a PEFT adapter of today (`lorafleet convert`).

Layouts and old fields are always corrected. A kind that has an exact plain LoRA becomes one; another stays as it is.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from lorafleet.protocol.adapter_formats.adapter_files import DRAFT_NAMES, OPTIONAL_NAMES, AdapterFolder
from lorafleet.protocol.adapter_formats.adapter_rope import DEFAULTS_NAME
from lorafleet.protocol.errors import AdapterUnsupported, ConfigError
from lorafleet.tools.base_checkpoint import BaseModel
from lorafleet.tools.copied_tokenizer import MAX_BYTES, copy_file, tokenizer_files
from lorafleet.tools.kind_names import is_plain, kind_of, why_never_plain
from lorafleet.tools.layouts import read_layout
from lorafleet.tools.low_rank import Reduced, reduce_rank
from lorafleet.tools.mix_adapters import Mixing, mix
from lorafleet.tools.new_folder import new_folder
from lorafleet.tools.peft_files import PEFTFiles
from lorafleet.tools.plain_lora import PlainLoRA, cast_all
from lorafleet.tools.reading import read_forms
from lorafleet.workers.adapters.forms import AdapterForms


@dataclass(frozen=True, slots=True)
class Conversion:
    """The result of a conversion."""

    kind: str
    changes: list[str]
    max_rank: int | None  # Largest rank of the result; None if its matrices were not recomputed.
    # What each module lost, if a rank was requested or the mixture has one.
    reduced: dict[str, Reduced] = field(default_factory=dict)


def convert(
    source: Path, target: Path, base: BaseModel | None, *, dtype: torch.dtype | None = None, rank: int | None = None
) -> Conversion:
    """Converts one adapter and writes it to `target`, a new folder.

    Args:
        base: Needed by kinds whose adapter has a meaning only with the base's weights.
        dtype: The dtype of the result. None keeps stored values as they are; computed values are float32.
        rank: The largest rank that may stay.

    Raises AdapterError and ConfigError.
    """
    files = read_layout(source)
    reason, plain = why_never_plain(files.config), None
    try:
        forms = _forms(files, base)  # This rejects a damaged adapter, which rewriting would not repair.
    except ConfigError:  # Only the base could tell; for a kind that is never plain, it need not.
        if reason is None:
            raise
    else:
        try:
            plain = PlainLoRA.from_forms(forms, _base_name(files))
        except AdapterUnsupported as error:
            reason = reason or error.message
    if rank is None and is_plain(files.config, files.tensors):
        return _write(files, target, dtype, kind_of(files.config), source)
    if plain is None:
        if rank is not None:
            raise AdapterUnsupported(f"its rank cannot be changed, since no plain LoRA equals it: {reason}.")
        kind = kind_of(files.config)
        kept = replace(files, changes=[*files.changes, f"kept as {kind}, which no plain LoRA equals: {reason}"])
        return _write(kept, target, dtype, kind, source)
    changes = [*files.changes]
    if not is_plain(files.config, files.tensors):
        changes.append(f"{kind_of(files.config)} -> plain LoRA")
    if forms.left_out:
        changes.append(f"left out {', '.join(forms.left_out)}, which is not for texts")
    reduced = {}
    if rank is not None:
        reduced = {name: reduce_rank(pair, rank) for name, pair in plain.modules.items()}
        plain = replace(plain, modules={name: reduction.pair for name, reduction in reduced.items()})
    written = _write(plain.to_files(changes), target, dtype, "LoRA", source)
    return replace(written, max_rank=plain.max_rank, reduced=reduced)


def convert_several(
    sources: Sequence[Path],
    weights: Sequence[float],
    target: Path,
    base: BaseModel | None,
    how: Mixing,
    *,
    dtype: torch.dtype | None = None,
) -> Conversion:
    """Writes one adapter that is the weighted mixture of several (mix_adapters.py)."""
    adapters = [_plain(source, base) for source in sources]
    mixture, reduced = mix(adapters, weights, how)
    changes = [f"{how.method} of {len(adapters)} adapters"]
    # The draft LoRA of one of them predicts the mixture's answers badly.
    written = _write(mixture.to_files(changes), target, dtype, "LoRA", sources[0], OPTIONAL_NAMES.keys() - DRAFT_NAMES)
    return replace(written, max_rank=mixture.max_rank, reduced=reduced)


def _plain(source: Path, base: BaseModel | None) -> PlainLoRA:
    files = read_layout(source)
    return PlainLoRA.from_forms(_forms(files, base, source), _base_name(files))


def _forms(files: PEFTFiles, base: BaseModel | None, source: Path | None = None) -> AdapterForms:
    """Reads the files with the server's reader, so that they mean the same here as there. With `source`, its
    lorafleet.json counts too, which may state a rope scaling."""
    with tempfile.TemporaryDirectory(prefix="lorafleet-convert-") as draft:
        files.write(Path(draft))
        if source is not None and AdapterFolder.at(source).has(DEFAULTS_NAME):
            copy_file(source, Path(draft), DEFAULTS_NAME, OPTIONAL_NAMES[DEFAULTS_NAME])
        return read_forms(Path(draft), base, "source").forms


def _base_name(files: PEFTFiles) -> str | None:
    name = files.config.get("base_model_name_or_path")
    return name if isinstance(name, str) else None


def _write(
    files: PEFTFiles,
    target: Path,
    dtype: torch.dtype | None,
    kind: str,
    source: Path,
    optional: Collection[str] = OPTIONAL_NAMES,
) -> Conversion:
    """`optional` names the files that are copied from `source` where it has them, beside its tokenizer."""
    if dtype is not None:
        files = replace(files, tensors=cast_all(files.tensors, dtype))
    with new_folder(target) as folder:
        files.write(folder)
        names = set(tokenizer_files(source)).union(name for name in optional if AdapterFolder.at(source).has(name))
        for name in sorted(names):
            copy_file(source, folder, name, OPTIONAL_NAMES.get(name, MAX_BYTES))
    return Conversion(kind, files.changes, None)
