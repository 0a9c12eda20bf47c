"""Checks an adapter's changes of the embedding and the head, and builds their forms.

An adapter can replace them (modules_to_save, or a resized vocabulary), replace rows of them (trained tokens), and add
LoRA to them. If the base's two are one tensor, what replaces the base's own weight is for both. If config.json calls
them tied, PEFT also ties trained tokens of the embedding, and LoRA and modules_to_save with ensure_weight_tying.

If the base's head has a bias, PEFT saves one with every table that replaces the head's, and with the option bias.
"""

# V vocabulary of the adapter · R rank · D hidden size · N trained tokens

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lorafleet.protocol.adapter_formats.safetensors_header import TensorInfo
from lorafleet.protocol.errors import AdapterMalformed, AdapterMismatch, AdapterTooLarge, AdapterUnsupported
from lorafleet.protocol.strict_json import shown
from lorafleet.workers.adapters.base_layout import EMBEDDING, HEAD, TABLES
from lorafleet.workers.adapters.forms import LinearForm, LowRank, VocabForm
from lorafleet.workers.adapters.kinds.dora import row_scale
from lorafleet.workers.adapters.kinds.kind import Base, Target, on, row_chunks, tensor_shape
from lorafleet.workers.adapters.kinds.lora import EMBEDDING_A, EMBEDDING_B, MAGNITUDE
from lorafleet.workers.adapters.kinds.mutated_base import mutates
from lorafleet.workers.adapters.kinds.trained_tokens import ROWS, token_rows, trained_tokens
from lorafleet.workers.adapters.peft_helper import PEFTHelper
from lorafleet.workers.adapters.peft_names import (
    BASE_BIAS,
    BASE_COPY,
    SAVED,
    SAVED_BIAS,
    SAVED_ORIGINAL,
    SAVED_TWICE,
    TOKEN_BASE,
    TOKEN_ROWS,
    NamedTensors,
)

MAX_ADDED_TOKENS = 65_536  # a resized vocabulary adds some tokens; it does not multiply their number


@dataclass(slots=True)
class Table:
    """An adapter's changes of the embedding or the head."""

    tensor: str | None = None  # replaces the base's table
    is_copy: bool = False  # the tensor may be a mere copy of the base's table
    tokens: tuple[int, ...] = ()  # trained tokens, in the order of their rows
    rows: str | None = None  # tensor of the trained tokens' rows
    target: Target | None = None  # set if the adapter targets the table itself
    bias: str | None = None  # tensor that replaces the bias of the base's head


@dataclass(frozen=True, slots=True)
class VocabularyChanges:
    """The checked changes of the embedding and the head."""

    size: int  # rows of both tables
    tables: Mapping[str, Table] = field(default_factory=dict)
    same: tuple[tuple[str, str], ...] = ()  # pairs that are one tensor in PEFT's model and must not differ

    def check_same(self, values: Mapping[str, Tensor]) -> None:
        for name, other in self.same:
            if not torch.equal(values[name], values[other]):
                raise AdapterMalformed(f"{shown(name)} and {shown(other)} differ, but PEFT has one tensor for both.")


def take_vocabulary(
    helper: PEFTHelper, named: NamedTensors, infos: Mapping[str, TensorInfo], base: Base, max_rank: int
) -> VocabularyChanges:
    """Takes the tensors of embedding and head out of `named` and checks their shapes. Any left there are stray."""
    tables = {name: Table() for name in TABLES}
    tied, called_tied = base.layout.tied, base.layout.ties_adapters
    together = called_tied and helper.flag("ensure_weight_tying")
    saved = [name for name in TABLES if _is_saved(helper, name, named, base)]
    targeted = [name for name in TABLES if _is_targeted(helper, name, named, base)]
    tokens = trained_tokens(helper, called_tied)
    if together:
        saved, targeted = (list(TABLES) if names else [] for names in (saved, targeted))
    twice: list[tuple[str, str]] = []
    for name, table in tables.items():
        leaves = named.by_module.get(name, {})
        wrapper = _copy_leaf(helper, name in saved, name in targeted, name in tokens)
        twice += _take_table(name, table, leaves, name in saved, wrapper)
        if name in base.layout.biased:
            table.bias = _take_bias(table, helper, leaves, name in targeted)
        if name in targeted:
            table.target = _target(name, named, helper, infos, base, max_rank)
            table.target.saved_bias = table.bias
    for name, own in tokens.items():
        tables[name].tokens = own
        is_shared = called_tied and own == tokens.get(EMBEDDING)
        tables[name].rows = _take_rows(name, named.by_module.get(name, {}), helper, is_shared)
    if together and len(set(tokens.values())) > 1:
        raise AdapterMalformed("ensure_weight_tying is set, but the head's trained tokens are not the embedding's.")
    copies = [t.tensor for t in tables.values() if t.tensor and (tied if t.is_copy else together)]
    same = (copies[0], copies[1]) if len(copies) == 2 else None
    _share(tables, tied, saved)
    if called_tied and HEAD in tokens and tables[HEAD].rows is None:
        tables[HEAD].rows = tables[EMBEDDING].rows
    if tied and tables[HEAD].target is not None and tables[HEAD].tensor is None and mutates(helper):
        raise AdapterUnsupported(
            f"init_lora_weights or kasa_config changes the base. On a {HEAD} that is tied to the embedding, this is "
            "supported only if the file has the changed weight: save the adapter with save_embedding_layers=True."
        )
    vocabulary = VocabularyChanges(
        _check_size(tables, infos, base), tables, (*twice, *([] if same is None else [same]))
    )
    _check_parts(vocabulary, infos, base)
    return vocabulary


def _is_saved(helper: PEFTHelper, name: str, named: NamedTensors, base: Base) -> bool:
    return helper.saves_as(base.layout.spelled(name), is_held=SAVED in named.by_module.get(name, {}))


def _is_targeted(helper: PEFTHelper, name: str, named: NamedTensors, base: Base) -> bool:
    names, is_held = base.layout.spelled(name), named.is_adapted(name)
    return helper.method != "TRAINABLE_TOKENS" and helper.targets_as(names, is_held=is_held, is_linear=False)


def _copy_leaf(helper: PEFTHelper, is_saved: bool, is_targeted: bool, has_tokens: bool) -> str:
    """Returns the only leaf that PEFT's model has for the table itself, which depends on what wraps it. PEFT ignores
    any other."""
    if is_saved:
        return SAVED
    if is_targeted or (has_tokens and helper.method == "TRAINABLE_TOKENS"):
        return BASE_COPY
    return TOKEN_BASE if has_tokens else SAVED


def _take_table(
    name: str, table: Table, leaves: dict[str, str], is_saved: bool, copy_leaf: str
) -> list[tuple[str, str]]:
    """Sets the tensor that replaces the table, and returns pairs of tensors that hold the same table. Tensors of other
    leaves than `copy_leaf` are strays."""
    if is_saved and SAVED not in leaves:
        raise AdapterMalformed(
            f"adapter_config.json says that {name} is saved (modules_to_save), but the weights file lacks it."
        )
    replacing = leaves.pop(copy_leaf, None)
    _check_no_strays(name, leaves)
    if replacing is None:
        return []
    table.tensor, table.is_copy = replacing, not is_saved
    if not is_saved:
        return []
    leaves.pop(SAVED_ORIGINAL, None)  # the table before training; PEFT does not use it either
    return [(replacing, leaves.pop(SAVED_TWICE))] if SAVED_TWICE in leaves else []


def _check_no_strays(name: str, leaves: Mapping[str, str]) -> None:
    """Raises AdapterMalformed for a copy of the table in a place where PEFT's model has none."""
    stray = next((leaves[leaf] for leaf in (SAVED, BASE_COPY, TOKEN_BASE) if leaf in leaves), None)
    if stray is not None:
        raise AdapterMalformed(
            f"the tensor {shown(stray)} would replace the table of {name}, but what adapter_config.json describes does "
            "not have it, so PEFT ignores it. Remove it from the weights file, or correct target_modules, "
            "modules_to_save or trainable_token_indices."
        )


def _take_bias(table: Table, helper: PEFTHelper, leaves: dict[str, str], is_targeted: bool) -> str | None:
    """Takes the tensor that replaces the head's bias. `table` has what replaces its weight."""
    found = [leaves.pop(leaf) for leaf in (SAVED_BIAS, BASE_BIAS) if leaf in leaves]
    is_wanted = table.tensor is not None or helper.bias == "all" or (helper.bias == "lora_only" and is_targeted)
    if len(found) != int(is_wanted):
        raise AdapterMalformed(
            f"the weights file has {len(found)} biases of {HEAD}; adapter_config.json and the other tensors require "
            f"{int(is_wanted)}."
        )
    return found[0] if found else None


def _target(
    name: str, named: NamedTensors, helper: PEFTHelper, infos: Mapping[str, TensorInfo], base: Base, max_rank: int
) -> Target:
    """Returns the target for the table itself. Its shape is set when the size of the vocabulary is known."""
    leaves = named.by_module.get(name, {})
    own = {leaf: leaves.pop(leaf) for leaf in list(leaves) if leaf not in (ROWS, TOKEN_ROWS)}
    if not own:
        raise AdapterMalformed(f"adapter_config.json targets {name}, but the weights file has no tensors for it.")
    spelled = base.layout.spelled(name)
    return Target(name, (0, 0), own, named.shared, infos, helper, base, max_rank, spelled=spelled)


def _take_rows(name: str, leaves: dict[str, str], helper: PEFTHelper, is_shared: bool) -> str | None:
    leaf = ROWS if helper.method == "TRAINABLE_TOKENS" else TOKEN_ROWS
    if leaf in leaves:
        return leaves.pop(leaf)
    if name == HEAD and is_shared:  # PEFT saves only the embedding's
        return None
    raise AdapterMalformed(f"adapter_config.json has trained tokens of {name}, but the weights file has no {leaf}.")


def _share(tables: Mapping[str, Table], tied: bool, saved: Sequence[str]) -> None:
    """Applies a replacement of the base's own weight to both tables if they are tied."""
    copies = [table for table in tables.values() if table.is_copy]
    if tied and len(copies) == 1:
        for name, table in tables.items():
            if table.tensor is None and name not in saved:
                table.tensor, table.is_copy = copies[0].tensor, True


def _check_size(tables: Mapping[str, Table], infos: Mapping[str, TensorInfo], base: Base) -> int:
    """Returns the number of rows, in which both tables must agree."""
    layout = base.layout
    sizes = {}
    for name, table in tables.items():
        sizes[name] = layout.vocab_size
        if table.tensor is None:
            continue
        shape = tensor_shape(table.tensor, infos)
        if len(shape) != 2 or shape[1] != layout.hidden_size or not shape[0]:
            raise AdapterMismatch(
                f"the tensor {shown(table.tensor)} has shape {shown(list(shape))}; {base.named} has "
                f"{layout.vocab_size} tokens of size {layout.hidden_size}. The adapter was made for another model."
            )
        if shape[0] > layout.vocab_size + MAX_ADDED_TOKENS:
            raise AdapterTooLarge(
                f"the tensor {shown(table.tensor)} has {shape[0]} tokens; {base.named} has {layout.vocab_size}, and an "
                f"adapter may add at most {MAX_ADDED_TOKENS}."
            )
        sizes[name] = shape[0]
    if sizes[EMBEDDING] != sizes[HEAD]:
        raise AdapterMalformed(
            f"the adapter leaves {EMBEDDING} with {sizes[EMBEDDING]} rows and {HEAD} with {sizes[HEAD]}: a resized "
            "vocabulary must be saved whole (save_embedding_layers=True)."
        )
    return sizes[HEAD]


def _check_parts(vocabulary: VocabularyChanges, infos: Mapping[str, TensorInfo], base: Base) -> None:
    size, hidden = vocabulary.size, base.layout.hidden_size
    for name, table in vocabulary.tables.items():
        if table.target is not None:
            table.target.shape = (size, hidden) if name == EMBEDDING else (hidden, size)
            table.target.saved_weight = table.tensor
        if table.rows is not None and tensor_shape(table.rows, infos) != (len(table.tokens), hidden):
            raise AdapterMismatch(
                f"the tensor {shown(table.rows)} has shape {shown(list(infos[table.rows].shape))}; adapter_config.json "
                f"and {base.named} require {[len(table.tokens), hidden]}."
            )
        if table.bias is not None and tensor_shape(table.bias, infos) != (size,):
            raise AdapterMismatch(
                f"the tensor {shown(table.bias)} has shape {shown(list(infos[table.bias].shape))}; the adapter's "
                f"vocabulary requires {[size]}."
            )
        if table.tokens and name in base.layout.biased:
            raise AdapterUnsupported(
                f"trained tokens of {HEAD}, which has a bias, are not supported; PEFT 0.21 leaves the bias out. Save "
                f"{HEAD} whole (modules_to_save)."
            )
        if table.tokens and max(table.tokens) >= size:
            raise AdapterMalformed(f"token {max(table.tokens)} is trained, but the vocabulary has only {size} tokens.")
        if table.tokens and table.target is not None and name == EMBEDDING:
            raise AdapterUnsupported(
                f"LoRA together with trained tokens on {EMBEDDING} is not supported; PEFT 0.21 rejects it too."
            )


def check_embedding(target: Target) -> int:
    """Checks LoRA on an embedding, where A is [r, V] and B is [D, r], and returns the rank."""
    dora = target.helper.flag("use_dora")
    target.expect_leaves(EMBEDDING_A, EMBEDDING_B, *([MAGNITUDE] if dora else []))
    tokens, hidden = target.shape
    for key in ("lora_bias", "use_bdlora", "kasa_config", "alora_invocation_tokens"):
        if target.helper.is_set(key) or target.helper.has_object(key):
            raise AdapterUnsupported(f"{key} with LoRA on {EMBEDDING} is not supported; PEFT 0.21 rejects it too.")
    target.expect(EMBEDDING_A, target.rank, tokens)
    target.expect(EMBEDDING_B, hidden, target.rank)
    if dora:
        target.expect(MAGNITUDE, hidden)
    return target.rank


def embedding_form(table: Table, values: Mapping[str, Tensor], base: Base) -> VocabForm | None:
    form = _replaced(EMBEDDING, table, values, base)
    target = table.target
    if target is None:
        return form
    a_RV, b_DR = target.value(EMBEDDING_A), target.value(EMBEDDING_B)
    low_rank = LowRank(a_RV, b_DR, target.scaling)
    if not target.helper.flag("use_dora"):
        return VocabForm(low_rank, form.table_VD if form is not None else None)
    with target.weights.beside_the_steps():
        weight_VD = target.base_weight()
        scale_D = row_scale(weight_VD.T, [low_rank], target.value(MAGNITUDE), EMBEDDING)
        rows = LowRank(b_DR.T, a_RV.T, low_rank.scaling)
        return VocabForm(table_VD=_computed(weight_VD, rows, scale_D, None, _served_dtype(target)))


def head_form(table: Table, linear: LinearForm | None, values: Mapping[str, Tensor], base: Base) -> VocabForm | None:
    """Returns the form of the head. `linear` is the kind's form of it, if the head is targeted."""
    form = _replaced(HEAD, table, values, base)
    bias_V = None if table.bias is None else values[table.bias].float()
    table_VD, rows = (None, None) if form is None else (form.table_VD, form.rows)
    if linear is None or table.target is None:
        return VocabForm(None, table_VD, rows, bias_V) if form is not None or bias_V is not None else None
    if linear.bias_O is not None:
        bias_V = linear.bias_O
    if linear.kronecker is None and linear.out_scale_O is None:
        return VocabForm(linear.low_rank, table_VD, rows, bias_V)
    if rows is not None:
        raise AdapterUnsupported(f"trained tokens together with more than a low rank on {HEAD} are not supported.")
    if linear.kronecker is not None:
        raise AdapterUnsupported(f"a Kronecker product of high rank on {HEAD} is not supported.")
    with table.target.weights.beside_the_steps():
        weight_VD, dtype = table.target.base_weight(), _served_dtype(table.target)
        table_VD = _computed(weight_VD, linear.low_rank, None, linear.out_scale_O, dtype)
    return VocabForm(table_VD=table_VD, bias_V=bias_V)


def _served_dtype(target: Target) -> torch.dtype:
    return target.weights.weight(target.module).dtype


def _replaced(name: str, table: Table, values: Mapping[str, Tensor], base: Base) -> VocabForm | None:
    """Returns the form that replaces the base's table or rows, without LoRA."""
    table_VD = None if table.tensor is None else values[table.tensor]
    if table_VD is not None and table.is_copy and _is_base(table_VD, name, base):
        table_VD = None
    rows = None if table.rows is None else token_rows(table.tokens, values[table.rows])
    return None if table_VD is None and rows is None else VocabForm(table_VD=table_VD, rows=rows)


def _is_base(table_VD: Tensor, name: str, base: Base) -> bool:
    """Returns whether the table is the base's own. PEFT saves a targeted embedding's table too, mostly unchanged."""
    if base.weights is None:
        return False
    own_VD = base.weights.weight(name)
    if own_VD.shape != table_VD.shape:
        return False
    with base.weights.beside_the_steps():
        return all(
            torch.equal(table_VD[rows].to(own_VD.device, own_VD.dtype), own_VD[rows]) for rows in row_chunks(own_VD)
        )


def _computed(
    weight_VD: Tensor, low_rank: LowRank | None, scale_D: Tensor | None, scale_V: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Returns W + s B A with its columns or rows scaled, in `dtype` on the CPU."""
    device = weight_VD.device
    chunks = []
    for rows in row_chunks(weight_VD):
        chunk_VD = weight_VD[rows].float()
        if low_rank is not None:
            b_VR = on(low_rank.b_OR[rows], device)
            chunk_VD = torch.addmm(chunk_VD, b_VR, on(low_rank.a_RD, device), alpha=low_rank.scaling)
        if scale_D is not None:
            chunk_VD = chunk_VD * on(scale_D, device)
        if scale_V is not None:
            chunk_VD = chunk_VD * on(scale_V[rows], device).unsqueeze(1)
        chunks.append(chunk_VD.to(dtype).cpu())
    return torch.cat(chunks)
