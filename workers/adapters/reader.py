"""Reads one adapter's files, checks them against the base, and returns its forms. Errors name their cause.

It combines the other readers: adapter_files.py opens the files, peft_helper.py reads the config, weight_files.py
reads the tensors, adapter_parts.py sorts them, and kinds/ turns them into forms. It knows nothing of slots or tiers:
lora_model.py takes the result.
"""

# R rank · D in features · O out features

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from lorafleet.kernels.quant.fp8 import FP8
from lorafleet.protocol.adapter_formats.adapter_classifier import read_classifier
from lorafleet.protocol.adapter_formats.adapter_files import (
    DRAFT_CONFIG_NAME,
    DRAFT_FOLDER,
    DRAFT_WEIGHTS_NAME,
    AdapterFolder,
    check_same_config,
    language_digest,
    new_digest,
    open_weights,
    opened_optional,
    read_config,
    read_draft,
    read_language,
)
from lorafleet.protocol.adapter_formats.adapter_rope import DEFAULTS_NAME, read_adapter_rope
from lorafleet.protocol.adapter_formats.safetensors_header import TensorInfo
from lorafleet.protocol.adapter_formats.sealed_memory import SealedContent
from lorafleet.protocol.errors import AdapterError, AdapterMalformed, RankTooLarge
from lorafleet.protocol.strict_json import shown
from lorafleet.protocol.yield_gil import yielding_gil
from lorafleet.workers.adapters.adapter_parts import AdapterParts
from lorafleet.workers.adapters.casting import max_magnitude
from lorafleet.workers.adapters.content_digest import ContentDigest
from lorafleet.workers.adapters.forms import AdapterForms, LinearForm, OwnRope, VocabForm
from lorafleet.workers.adapters.kinds.kind import Base
from lorafleet.workers.adapters.own_rope import own_rope
from lorafleet.workers.adapters.parallel_reading import ParallelReader
from lorafleet.workers.adapters.peft_helper import PEFTHelper
from lorafleet.workers.adapters.weight_files import (
    LoadedTensors,
    MemoryFile,
    ReadTargets,
    SafetensorsFile,
    WeightsFile,
    read_weights,
)

_Judged = tuple[AdapterParts, OwnRope]
_Judge = Callable[[PEFTHelper, Mapping[str, bytes], Mapping[str, TensorInfo]], _Judged]
# Returns where an adapter's values are read to, or None if that does not matter or is not known.
Place = Callable[[AdapterParts], ReadTargets | None]


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """An adapter that was read and has passed all checks."""

    forms: AdapterForms
    content: ContentDigest  # sha256 of config, weights and language
    read_s: float  # seconds spent reading the values
    language: str = ""  # language_digest of its tokenizer and chat template files
    block: Tensor | None = None  # ReadTargets.block, in which values may lie
    draft: SealedContent | None = None  # its draft LoRA, not checked yet; None if it has none, or it is not wanted

    @property
    def digest(self) -> str:
        """The confirmed digest (hex). It may have to be waited for; AdapterChanged if another was expected."""
        return self.content.confirm()


def read_adapter(
    source: str | os.PathLike[str] | SealedContent,
    *,
    base: Base,
    max_rank: int,
    dtype: torch.dtype,
    name: str,
    expected_digest: str = "",
    reader: ParallelReader | None = None,
    place: Place | None = None,
    keeps_draft: bool = False,
) -> ReadAdapter:
    """Reads and checks the adapter in a folder or in memory. Raises an AdapterError, and never returns half an adapter.

    Without a reader, the digest is confirmed when this returns. With one, the adapter must not be used before its
    `digest` has been taken, which confirms it.

    Args:
        source: the folder, or memory whose digest is `expected_digest`.
        base: the base that serves the adapter.
        max_rank: the largest rank that is served.
        dtype: the serving dtype, which must hold the adapter's values.
        name: the adapter's name, for messages.
        expected_digest: if given, files with another digest raise AdapterChanged.
        reader: threads that read the values and compute their digest.
        place: called once the tensors' names and shapes are checked.
        keeps_draft: whether the draft LoRA is wanted in memory; otherwise its files only count for the digest.
    """

    def judge(helper: PEFTHelper, language: Mapping[str, bytes], infos: Mapping[str, TensorInfo]) -> _Judged:
        parts = AdapterParts.of(helper, infos, base, max_rank)
        _check_rank_limit(parts, name, max_rank)
        stated = read_adapter_rope(helper.fields, language.get(DEFAULTS_NAME))
        read_classifier(helper.fields, language.get(DEFAULTS_NAME), infos)  # rejects wrong labels
        return parts, own_rope(stated, base, bool(parts.invocation_tokens))

    with _about(name), _opened(source, expected_digest, reader, judge, keeps_draft) as opened:
        helper, language, draft, weights = opened
        parts, rope = judge(helper, language, weights.infos)
        reading = time.perf_counter()
        loaded, block = _load(weights, parts, place)
        read_s = time.perf_counter() - reading
    content = ContentDigest(loaded.digest, expected_digest, name)
    if reader is None:
        content.confirm()
    with content.confirmed_first(), _about(name):
        _check_values(loaded, dtype)
        forms = parts.forms(loaded.by_name, rope)
        _check_forms(forms, loaded, dtype)
    return ReadAdapter(forms, content, read_s, language_digest(language), block, draft)


@contextmanager
def _opened(
    source: str | os.PathLike[str] | SealedContent,
    expected_digest: str,
    reader: ParallelReader | None,
    judge: _Judge,
    keeps_draft: bool,
) -> Iterator[tuple[PEFTHelper, dict[str, bytes], SealedContent | None, WeightsFile]]:
    """Yields the config, the files of read_language(), the draft LoRA if there is one, and the weights, which must be
    loaded within the block.

    The files of a draft, which may be larger than the weights, are read only after the weights' header has been judged.
    """
    if isinstance(source, SealedContent):
        yield PEFTHelper.from_bytes(source.config), {}, None, MemoryFile(source.weights, expected_digest, reader)
        return
    folder = AdapterFolder.at(source)
    config = read_config(folder)
    helper = PEFTHelper.from_bytes(config)
    with open_weights(folder) as file:
        language, draft = read_language(folder), dict[str, memoryview]()
        if folder.has(DRAFT_FOLDER):
            judge(helper, language, read_weights(file, hashlib.sha256()).infos)
            file.stream.seek(0)
        if keeps_draft:
            draft = read_draft(folder)
            digest = new_digest(config, file.name, file.size, {**language, **draft})
        else:
            with opened_optional(folder) as optional:
                digest = new_digest(config, file.name, file.size, {**optional, **language})
        yield helper, language, _sealed(draft), read_weights(file, digest, reader, expected_digest)
    check_same_config(folder, config)


def _sealed(draft: Mapping[str, memoryview]) -> SealedContent | None:
    """Returns the files of read_draft() without a copy of the weights."""
    if not draft:
        return None
    return SealedContent(bytes(draft[DRAFT_CONFIG_NAME]), draft[DRAFT_WEIGHTS_NAME])


def _load(weights: WeightsFile, parts: AdapterParts, place: Place | None) -> tuple[LoadedTensors, Tensor | None]:
    """Returns the values, and the block that some of them were read into, if any."""
    if place is not None and isinstance(weights, SafetensorsFile) and weights.can_place:
        targets = place(parts)
        if targets is not None:
            return weights.load_into(targets), targets.block
    return weights.load(), None


def _range_of(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype whose largest number bounds the values. For FP8 weights it is the dtype of the scales."""
    return torch.float32 if dtype == FP8 else dtype


@contextmanager
def _about(name: str) -> Iterator[None]:
    """Begins each error message with the adapter's name."""
    try:
        yield
    except RankTooLarge:
        raise
    except AdapterError as error:
        raise type(error)(f"adapter {name!r}: {error.message}", error.param) from error


def _check_rank_limit(parts: AdapterParts, name: str, limit: int) -> None:
    module, rank = max(parts.ranks.items(), key=lambda item: item[1], default=("", 0))
    if rank > limit:
        own = parts.own_rank(module)
        served = "" if rank == own else f" (the rank at which {parts.kind.label} with r={own} is served)"
        raise RankTooLarge(
            f"adapter {name!r} has rank {rank}{served}; this server allows lora.max_lora_rank={limit}. "
            f"Raise lora.max_lora_rank to {rank} and restart, or retrain at rank <= {limit}."
        )


def _check_values(loaded: LoadedTensors, dtype: torch.dtype) -> None:
    """Checks that the values are finite in the serving dtype. The largest decides, since rounding preserves order."""
    dtype = _range_of(dtype)
    if loaded.largest is not None and loaded.largest.to(dtype).isfinite():
        return
    for name, tensor in loaded.by_name.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        largest = max_magnitude(tensor)
        if largest.to(dtype).isfinite():
            continue
        if not largest.isfinite():
            raise AdapterMalformed(f"the tensor {shown(name)} has NaN or infinite values.")
        raise AdapterMalformed(
            f"the tensor {shown(name)} has values up to {largest.item():.3g}, which overflow {dtype}, the "
            f"serving dtype. Serve with lora_dtype=bfloat16 or float32."
        )


def _check_forms(forms: AdapterForms, loaded: LoadedTensors, dtype: torch.dtype) -> None:
    """Checks that the forms change something, and that computed values fit the serving dtype too. Values left as they
    were read are checked already."""
    if forms.changes_nothing:
        raise AdapterMalformed(
            "its tensors change nothing: ranks are all pruned to 0, or tables are copies of the base's. Requests to it "
            "would get the base's answers; send them to the base."
        )
    read = {id(tensor) for tensor in loaded.by_name.values()}
    limit = torch.finfo(_range_of(dtype)).max
    for module, experts in forms.experts.items():
        if any(stack.scaling_EG.abs().max() > limit for stack in experts.stacks):
            raise AdapterMalformed(f"{module} has a scaling that overflows {dtype}.")
    for module, weight_D in forms.norms.items():
        if id(weight_D) not in read and not weight_D.float().isfinite().all():
            raise AdapterMalformed(f"{module} has computed values that overflow torch.float32.")
    tables = {"embed_tokens": forms.embedding, "lm_head": forms.head}
    everything: Mapping[str, LinearForm | VocabForm | None] = {**forms.linears, **tables}
    for module, form in yielding_gil(everything.items()):
        if form is None:
            continue
        for part in (form.low_rank, form.kronecker if isinstance(form, LinearForm) else None):
            if part is not None and abs(part.scaling) > limit:
                raise AdapterMalformed(f"{module} has the scaling {part.scaling}, which overflows {dtype}.")
        for tensor in _tensors(form):
            if id(tensor) not in read and not max_magnitude(tensor).to(_range_of(dtype)).isfinite():
                raise AdapterMalformed(f"{module} has computed values that overflow {dtype}, the serving dtype.")


def _tensors(form: LinearForm | VocabForm) -> Iterator[Tensor]:
    if form.low_rank is not None:
        yield form.low_rank.a_RD
        yield form.low_rank.b_OR
    if isinstance(form, VocabForm):
        if form.table_VD is not None:
            yield form.table_VD
        if form.bias_V is not None:
            yield form.bias_V
        return
    if form.kronecker is not None:
        yield form.kronecker.w1
        yield form.kronecker.w2
    yield from (vector for vector in (form.out_scale_O, form.bias_O) if vector is not None)
