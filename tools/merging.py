"""Merges one adapter into its base (`lorafleet merge`) and writes a Hugging Face checkpoint of the same architecture.

All arithmetic is in float32, with one tensor in memory at a time. The weights are split into files as the base's are.
A change that the architecture has no tensor for, such as a bias where it has none, is rejected by name.
"""

# D in features or hidden size · O out features · V vocabulary

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lorafleet.protocol.adapter_formats.adapter_files import AdapterFolder
from lorafleet.protocol.errors import AdapterMalformed, AdapterMismatch, AdapterUnsupported
from lorafleet.tools.base_checkpoint import BaseModel
from lorafleet.tools.copied_tokenizer import copy_file, tokenizer_files
from lorafleet.tools.expert_deltas import expert_delta, num_experts
from lorafleet.tools.new_folder import new_folder
from lorafleet.tools.safetensors_file import Entry, write_safetensors
from lorafleet.workers.adapters.forms import AdapterForms, ExpertsForm, LinearForm, StackedLowRank, VocabForm
from lorafleet.workers.bases.text_part import untied_flags

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
OTHER_FILES = ("generation_config.json",)
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Merged:
    """The result of a merge."""

    changed: list[str]  # Names of the tensors that are not copied from the base.
    num_bytes: int  # Size of all tensors.
    untied: bool  # Whether the head is now a tensor of its own, although the base ties it.
    vocab_size: int | None  # The new size; None if it is the base's.


@dataclass(slots=True)
class _Plan:
    """The way in which each tensor of the checkpoint is made."""

    base: BaseModel
    # Functions that compute tensors. A tensor that has none is copied from the base.
    makers: dict[str, Callable[[], Tensor]] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # Shapes that differ from the base's.
    untied: bool = False

    def replace(self, name: str, what: str, make: Callable[[], Tensor]) -> None:
        """Sets the function that computes a tensor. Raises AdapterUnsupported if the architecture has no such tensor.

        Args:
            name: The engine's name for the tensor.
            what: The change, for the error message.
        """
        name = self.base.stored_name(name)
        if name not in self.base.tensors:
            raise AdapterUnsupported(
                f"the adapter has {what}, and {self.base.config.architecture} has no {name}, so a merged checkpoint "
                "cannot hold it. Serve the adapter unmerged."
            )
        self.makers[name] = make

    def value(self, name: str) -> Tensor:
        name = self.base.stored_name(name)
        dtype = self.base.tensors[name].entry.dtype
        if dtype not in FLOATS:
            raise AdapterUnsupported(
                f"the base stores {name} quantized, as {dtype}; merge into the checkpoint that it was quantized from."
            )
        return self.base.value(name).float()


def merge(
    base: BaseModel, adapter: Path, forms: AdapterForms, target: Path, *, dtype: torch.dtype | None = None
) -> Merged:
    """Writes the merged checkpoint to `target`. If this fails, `target` is not created.

    Args:
        adapter: The folder that `forms` was read from. Its tokenizer is copied.
        dtype: The dtype of the weights. None keeps each tensor's own.

    Raises AdapterError and ConfigError.
    """
    if forms.invocation_tokens:
        raise AdapterUnsupported(
            "an activated LoRA (aLoRA) has no effect before its invocation, but merged weights would always have one."
        )
    if forms.classifier is not None:
        raise AdapterUnsupported(
            "the adapter has a classification head, which a merged checkpoint for generation cannot hold."
        )
    if forms.own_rope.rope is not None:
        raise AdapterUnsupported(
            "the adapter has a rope scaling of its own, which merged weights cannot hold. Merge it on a base whose "
            "config.json has that scaling, and remove it from the adapter."
        )
    plan = _Plan(base)
    for module, form in forms.linears.items():
        _plan_linear(plan, module, form)
    for module, experts in forms.experts.items():
        _plan_experts(plan, module, experts)
    for module, weight in forms.norms.items():
        plan.replace(f"model.{module}.weight", f"a replaced norm {module}", weight.float)
    _plan_vocabulary(plan, forms)
    with new_folder(target) as folder:
        num_bytes = _write_weights(plan, folder, dtype)
        _write_config(plan, folder, dtype)
        _copy_others(base, adapter, folder)
    return Merged(sorted(plan.makers), num_bytes, plan.untied, _vocab_size(plan))


def _plan_linear(plan: _Plan, module: str, form: LinearForm) -> None:
    name = f"model.{module}"
    if form.low_rank is not None or form.kronecker is not None or form.out_scale_O is not None:
        plan.replace(f"{name}.weight", f"a change of {module}", lambda: _weight(plan.value(f"{name}.weight"), form))
    if form.bias_O is not None:
        plan.replace(f"{name}.bias", f"a bias on {module}", form.bias_O.float)


def _plan_experts(plan: _Plan, module: str, form: ExpertsForm) -> None:
    """Plans the experts one by one, as checkpoints on the hub store them, or as one tensor for all experts of a
    layer, as transformers 5 may save them."""
    name, what, experts = f"model.{module}", f"a change of {module}", plan.base.config.experts
    assert experts is not None
    first = "gate_up_proj" if experts.is_gated else "up_proj"
    stacked = {f"{name}.{first}": form.gate_up, f"{name}.down_proj": form.down}
    if any(plan.base.stored_name(tensor) in plan.base.tensors for tensor in stacked):
        for tensor, stack in stacked.items():
            if stack is not None:
                plan.replace(tensor, what, partial(_stack, plan, tensor, stack))
        return
    for expert in range(num_experts(form)):
        for leaf, stack, rows in _projections(form, experts.is_gated):
            tensor = f"{name}.{expert}.{leaf}.weight"
            plan.replace(tensor, what, partial(_expert, plan, tensor, stack, expert, rows))


def _projections(form: ExpertsForm, gated: bool) -> list[tuple[str, StackedLowRank, int | None]]:
    """Returns (name, stack, half) for each projection, where half is the part of the stack's outputs that it uses: 0,
    1, or None for all of them."""
    found: list[tuple[str, StackedLowRank, int | None]] = []
    if form.gate_up is not None:
        halves = [("gate_proj", form.gate_up, 0), ("up_proj", form.gate_up, 1)]
        found += halves if gated else [("up_proj", form.gate_up, None)]
    if form.down is not None:
        found.append(("down_proj", form.down, None))
    return found


def _stack(plan: _Plan, name: str, stack: StackedLowRank) -> Tensor:
    experts, weights = plan.base.config.experts, plan.value(name)
    assert experts is not None
    for expert, weight in enumerate(weights):
        delta_OD = expert_delta(stack, expert)
        if experts.interleaved and name.endswith(".gate_up_proj"):
            delta_OD = delta_OD.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
        weight += delta_OD.T if experts.transposed else delta_OD
    return weights


def _expert(plan: _Plan, name: str, stack: StackedLowRank, expert: int, half: int | None) -> Tensor:
    delta_OD = expert_delta(stack, expert)
    return plan.value(name) + (delta_OD if half is None else delta_OD.chunk(2)[half])


def _weight(weight_OD: Tensor, form: LinearForm) -> Tensor:
    if form.low_rank is not None:
        pair = form.low_rank
        weight_OD = torch.addmm(weight_OD, pair.b_OR.float(), pair.a_RD.float(), alpha=pair.scaling)
    if form.kronecker is not None:
        product = form.kronecker
        weight_OD = weight_OD + product.scaling * torch.kron(
            product.w1.float().contiguous(), product.w2.float().contiguous()
        )
    return weight_OD if form.out_scale_O is None else weight_OD * form.out_scale_O.float().unsqueeze(1)


def _plan_vocabulary(plan: _Plan, forms: AdapterForms) -> None:
    embedding, head = forms.embedding, forms.head
    if embedding is None and head is None:
        return
    if head is not None and head.bias_V is not None:
        raise AdapterUnsupported("the adapter has a bias on lm_head, which no supported architecture has.")
    sizes = [_num_rows(plan.base, form) for form in (embedding, head)]
    if sizes[0] != sizes[1]:
        raise AdapterMismatch(
            f"the adapter would leave {sizes[0]} tokens in the embedding and {sizes[1]} in the head; a checkpoint has "
            "one vocabulary."
        )
    shape = (sizes[0], plan.base.config.hidden_size)
    stored_head = EMBEDDING if plan.base.config.tie_word_embeddings else HEAD
    tables = {
        EMBEDDING: lambda: _table(plan.value(EMBEDDING), embedding, is_head=False),
        HEAD: lambda: _table(plan.value(stored_head), head, is_head=True),
    }
    if plan.base.config.tie_word_embeddings:
        plan.untied = not torch.equal(tables[EMBEDDING](), tables[HEAD]())
    if embedding is not None:
        own_name = plan.base.stored_name(EMBEDDING)
        plan.makers[own_name], plan.shapes[own_name] = tables[EMBEDDING], shape
    if plan.untied or (head is not None and not plan.base.config.tie_word_embeddings):
        plan.makers[HEAD], plan.shapes[HEAD] = tables[HEAD], shape


def _num_rows(base: BaseModel, form: VocabForm | None) -> int:
    return base.config.vocab_size if form is None or form.table_VD is None else form.table_VD.shape[0]


def _table(stored_VD: Tensor, form: VocabForm | None, *, is_head: bool) -> Tensor:
    if form is None:
        return stored_VD
    table_VD = stored_VD if form.table_VD is None else form.table_VD.float()
    if form.rows is not None:
        table_VD = table_VD.index_copy(0, form.rows.token_N, form.rows.row_ND.float())
    if form.low_rank is not None:
        a, b = form.low_rank.a_RD.float(), form.low_rank.b_OR.float()
        table_VD = table_VD + form.low_rank.scaling * (b @ a if is_head else (b @ a).T)
    return table_VD


def _write_weights(plan: _Plan, folder: Path, dtype: torch.dtype | None) -> int:
    """Writes the weights, split into files as the base's are, and returns their size in bytes. A head that was tied
    to the embedding is written to the embedding's file. A copy of the embedding as the head is left out, since it would
    have to change with it."""
    stored = {
        name: tensor
        for name, tensor in plan.base.tensors.items()
        if not (plan.base.config.tie_word_embeddings and name == HEAD)
    }
    entries = {name: _entry(plan, name, tensor.entry, dtype) for name, tensor in stored.items()}
    files = {name: tensor.file.name for name, tensor in stored.items()}
    if plan.untied:
        own_name = plan.base.stored_name(EMBEDDING)
        entries[HEAD] = _entry(plan, HEAD, stored[own_name].entry, dtype)
        files[HEAD] = files[own_name]
    for file in dict.fromkeys(files.values()):
        here = {name: entries[name] for name in entries if files[name] == file}
        write_safetensors(folder / file, here, partial(_made, plan, entries))
    num_bytes = sum(entry.num_bytes for entry in entries.values())
    if len(set(files.values())) > 1 or (plan.base.folder / INDEX).exists():
        index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(files.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return num_bytes


def _entry(plan: _Plan, name: str, stored: Entry, dtype: torch.dtype | None) -> Entry:
    wanted = stored.dtype if dtype is None or not stored.dtype.is_floating_point else dtype
    return Entry(plan.shapes.get(name, stored.shape), wanted)


def _made(plan: _Plan, entries: Mapping[str, Entry], name: str) -> Tensor:
    make, dtype = plan.makers.get(name), entries[name].dtype
    if make is None:
        return plan.base.value(name).to(dtype)
    value = make()
    tensor = value.to(dtype)
    if not tensor.isfinite().all():
        raise AdapterMalformed(
            f"the merged {name} has values up to {value.abs().max().item():.3g}, which {dtype} cannot hold. "
            "Merge with --dtype bfloat16 or float32."
        )
    return tensor


def _vocab_size(plan: _Plan) -> int | None:
    rows = plan.shapes.get(plan.base.stored_name(EMBEDDING), plan.shapes.get(HEAD))
    return None if rows is None or rows[0] == plan.base.config.vocab_size else rows[0]


def _write_config(plan: _Plan, folder: Path, dtype: torch.dtype | None) -> None:
    config: dict[str, Any] = json.loads((plan.base.folder / "config.json").read_text(encoding="utf-8"))
    config.pop("auto_map", None)  # It names code that is not copied.
    vocab_size = _vocab_size(plan)
    if vocab_size is not None:
        config["vocab_size"] = vocab_size
    if plan.untied or plan.base.config.is_only_called_tied:
        config |= untied_flags(config)
    if dtype is not None:
        config["dtype" if "dtype" in config else "torch_dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _copy_others(base: BaseModel, adapter: Path, folder: Path) -> None:
    """Copies generation_config.json and a tokenizer. An adapter's own tokenizer is preferred, since its vocabulary
    may differ from the base's."""
    own = tokenizer_files(adapter)
    source = adapter if "tokenizer.json" in own else base.folder
    for name in tokenizer_files(source):
        copy_file(source, folder, name)
    for name in OTHER_FILES:
        if AdapterFolder.at(base.folder).has(name):
            copy_file(base.folder, folder, name)
