"""Sorts the contents of an adapter's files by purpose and checks them by shape, before any value is read.

Once the values are there, it builds the adapter's forms. kinds/ interprets the tensors of each kind. This module
handles what an adapter of any kind may also have: biases, norms, embeddings, a head of
its own and a classification head.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from lorafleet.protocol.adapter_formats.adapter_classifier import HeadTensors, find_head
from lorafleet.protocol.adapter_formats.safetensors_header import TensorInfo
from lorafleet.protocol.errors import AdapterMalformed, AdapterMismatch, AdapterUnsupported
from lorafleet.protocol.strict_json import shown
from lorafleet.protocol.yield_gil import yielding_gil
from lorafleet.workers.adapters.base_layout import EMBEDDING, HEAD, TABLES
from lorafleet.workers.adapters.expert_targets import (
    ExpertTargets,
    check_experts,
    check_variant,
    expert_name,
    take_experts,
)
from lorafleet.workers.adapters.forms import BASE_ROPE, AdapterForms, ClassifierForm, LinearForm, OwnRope
from lorafleet.workers.adapters.kinds.kind import Base, Kind, Target, tensor_shape
from lorafleet.workers.adapters.kinds.lora import invocation_tokens
from lorafleet.workers.adapters.kinds.table import KINDS
from lorafleet.workers.adapters.kinds.vocabulary import (
    VocabularyChanges,
    check_embedding,
    embedding_form,
    head_form,
    take_vocabulary,
)
from lorafleet.workers.adapters.peft_helper import PEFTHelper
from lorafleet.workers.adapters.peft_names import BASE_BIAS, SAVED, SAVED_BIAS, NamedTensors, name_tensors
from lorafleet.workers.adapters.scales import give_scales
from lorafleet.workers.adapters.spellings import Spelled

Infos = Mapping[str, TensorInfo]

# PEFT 0.21 puts this into target_parameters of mixtures whose routers have other names too, where it targets nothing.
_USUAL_ROUTER = "gate.weight"


@dataclass(frozen=True, slots=True)
class AdapterParts:
    """The checked parts of one adapter."""

    helper: PEFTHelper
    kind: Kind
    base: Base
    targets: list[Target]  # linears
    experts: dict[str, ExpertTargets]  # by module
    biases: dict[str, str]  # the file's tensors, by module
    norms: dict[str, str]  # the file's tensors, by module
    vocabulary: VocabularyChanges
    ranks: dict[str, int]  # as served, by module; 0 for a module that has no rank
    classifier: HeadTensors | None = None  # the classification head
    left_out: tuple[str, ...] = ()  # parts that no text passes through, which are not served, such as "visual"

    @classmethod
    def of(cls, helper: PEFTHelper, infos: Infos, base: Base, max_rank: int) -> AdapterParts:
        """Sorts and checks the tensors. Raises an AdapterError if any is missing, stray, misshapen or not served."""
        kind = KINDS[helper.method]
        kind.check_config(helper)
        classifier = _take_classifier(helper, infos, base)
        if classifier is not None:
            infos = {name: info for name, info in infos.items() if name not in classifier.names}
        named = name_tensors(infos, kind.leaves, kind.shared, kind.label, base.layout, base.named)
        base = base.as_named_in(named.root)
        kind.check_left_out(named.left_out.keys(), named.shared.keys())
        _check_saved_modules(helper, base)
        _check_parameters(helper, base)
        experts = take_experts(helper, named, infos, base, max_rank)
        targeted = _targeted_linears(helper, named, base)
        vocabulary = take_vocabulary(helper, named, infos, base, max_rank)
        _check_invocation(helper, vocabulary, base, targeted)
        norms = _take_norms(helper, named, infos, base)
        biases = _take_biases(helper, named, infos, base, targeted)
        targets = []
        for module in targeted:
            tensors = named.by_module.get(module)
            if tensors:
                shape = base.layout.linears[module]
                target = Target(
                    *(module, shape, tensors, named.shared, infos, helper, base, max_rank), spelled=targeted[module]
                )
                target.saved_bias = biases.get(module)
                targets.append(target)
        expert_targets = [target for of_layer in experts.values() for target in of_layer.targets()]
        tables = [table.target for table in vocabulary.tables.values() if table.target is not None]
        give_scales(helper, [*targets, *expert_targets, *tables], base.layout, named)
        ranks = {target.module: kind.check(target) for target in yielding_gil(targets)}
        for of_layer in experts.values():
            ranks |= check_experts(of_layer)
        _check_targets(targeted, named)
        parts = cls(
            *(helper, kind, base, targets, experts, biases, norms, vocabulary, ranks, classifier),
            left_out=named.left_out_parts,
        )
        parts._check_tables()
        return parts

    def forms(self, values: Mapping[str, Tensor], own_rope: OwnRope = BASE_ROPE) -> AdapterForms:
        """Returns the adapter's forms. `values` has every tensor, by the file's name."""
        tables = self.vocabulary.tables
        embedding, head = tables[EMBEDDING], tables[HEAD]
        self.vocabulary.check_same(values)
        targets = [*self.targets, *([head.target] if head.target is not None else [])]
        for target in (*targets, *([embedding.target] if embedding.target is not None else [])):
            target.values = values
        for target in yielding_gil(target for of_layer in self.experts.values() for target in of_layer.targets()):
            target.values = values
        made = self.kind.forms(targets) if targets else AdapterForms()
        linears = dict(made.linears)
        head_linear = linears.pop(HEAD, None)
        _check_absorbed(linears, self.base, self.kind.label)
        for module, name in self.biases.items():
            form = linears.get(module, LinearForm())
            if form.bias_O is None:
                linears[module] = LinearForm(form.low_rank, form.kronecker, form.out_scale_O, values[name].float())
        both = sorted(made.norms.keys() & self.norms.keys())
        if both:
            raise AdapterUnsupported(
                f"modules_to_save replaces {both[0]}, and the adapter also scales the inputs of the modules that read "
                "it. The two cannot be combined."
            )
        return AdapterForms(
            linears={module: form for module, form in linears.items() if _does_something(form)},
            embedding=embedding_form(embedding, values, self.base),
            head=head_form(head, head_linear, values, self.base),
            norms={**made.norms, **{module: values[name] for module, name in self.norms.items()}},
            experts={module: of_layer.form() for module, of_layer in yielding_gil(self.experts.items())},
            own_rope=own_rope,
            invocation_tokens=self.invocation_tokens,
            classifier=_classifier_form(self.classifier, values),
            left_out=self.left_out,
        )

    def own_rank(self, module: str) -> int:
        """Returns the rank that the config gives a module of `ranks`."""
        experts = (target for of_layer in self.experts.values() for target in of_layer.targets())
        tables = (table.target for table in self.vocabulary.tables.values() if table.target is not None)
        named = (t for t in (*self.targets, *tables, *experts) if module in (t.module, expert_name(t)))
        return next((target.rank for target in named), self.helper.r)

    @property
    def invocation_tokens(self) -> tuple[int, ...]:
        """The tokens that activate an activated LoRA; otherwise empty."""
        return invocation_tokens(self.helper) if self.helper.method == "LORA" else ()

    def _check_tables(self) -> None:
        tables = self.vocabulary.tables
        embedding, head = tables[EMBEDDING].target, tables[HEAD].target
        if embedding is not None:
            if self.helper.method != "LORA":
                raise AdapterUnsupported(
                    f"{self.kind.label} on {EMBEDDING} is not supported; PEFT 0.21 rejects it too."
                )
            self.ranks[EMBEDDING] = check_embedding(embedding)
        if head is not None:
            self.ranks[HEAD] = self.kind.check(head)


def _take_classifier(helper: PEFTHelper, infos: Infos, base: Base) -> HeadTensors | None:
    """Returns the classification head, whose shape is checked against the base's hidden size."""
    head = find_head(helper.fields, infos)
    if head is None:
        return None
    for name in head.names:
        tensor_shape(name, infos)
    if head.hidden_size != base.layout.hidden_size:
        raise AdapterMismatch(
            f"the head {shown(head.weight)} has {head.hidden_size} inputs; {base.named} has a hidden size of "
            f"{base.layout.hidden_size}. The adapter was made for another model."
        )
    return head


def _classifier_form(head: HeadTensors | None, values: Mapping[str, Tensor]) -> ClassifierForm | None:
    if head is None:
        return None
    bias_L = None if head.bias is None else values[head.bias].float()
    return ClassifierForm(head.task, values[head.weight].float(), bias_L)


def _check_invocation(helper: PEFTHelper, vocabulary: VocabularyChanges, base: Base, targeted: Collection[str]) -> None:
    """Raises AdapterMismatch for a token that no prompt can have, since the adapter would have no effect.

    Raises AdapterUnsupported for a linear that attention absorbs, since a query would apply it to keys before the
    invocation too.
    """
    tokens = invocation_tokens(helper) if helper.method == "LORA" else ()
    if tokens and max(tokens) >= vocabulary.size:
        raise AdapterMismatch(
            f"alora_invocation_tokens has token {max(tokens)}; {base.named} has tokens 0 to {vocabulary.size - 1}. "
            "The adapter was made for another model."
        )
    absorbed = next((module for module in targeted if module in base.layout.absorbed), None)
    if tokens and absorbed is not None:
        raise AdapterUnsupported(
            f"activated LoRA (alora_invocation_tokens) on {absorbed} is not supported, since the keys of all tokens "
            "share that weight. Train it on the other linears."
        )


def _check_absorbed(linears: Mapping[str, LinearForm], base: Base, label: str) -> None:
    """Raises AdapterUnsupported if the change of a linear that attention absorbs cannot be computed by head."""
    for module in base.layout.absorbed:
        if module in linears and linears[module].kronecker is not None:
            raise AdapterUnsupported(
                f"{label} on {module} is not supported with a rank over lora.max_lora_rank, since attention takes that "
                "weight apart by heads. Raise lora.max_lora_rank, or leave the module out."
            )


def _does_something(form: LinearForm) -> bool:
    """Returns whether the form changes anything. The form of a module that AdaLoRA has pruned to rank 0 does not."""
    return any(part is not None for part in (form.low_rank, form.kronecker, form.out_scale_O, form.bias_O))


def _check_saved_modules(helper: PEFTHelper, base: Base) -> None:
    """Raises AdapterUnsupported if PEFT would replace a linear, or everything in a larger module."""
    if not helper.modules_to_save:
        return
    experts = base.layout.experts
    modules = *base.layout.linears, *(experts.modules if experts is not None else ())
    whole = [name for module in modules for name in base.layout.spelled(module).own]
    norms = [name for module in base.layout.norms for name in base.layout.spelled(module).own]
    for module in (*whole, *_containers((*whole, *norms))):
        if helper.saves(module):
            raise AdapterUnsupported(
                f"modules_to_save replaces {module}, which is not supported; it can replace norms, {EMBEDDING} and "
                f"{HEAD}. Train LoRA on {module} instead."
            )


def _containers(modules: Iterable[str]) -> list[str]:
    found: dict[str, None] = {}
    for module in modules:
        while "." in module:
            module = module.rpartition(".")[0]
            found[module] = None
    return list(found)


def _take_norms(helper: PEFTHelper, named: NamedTensors, infos: Infos, base: Base) -> dict[str, str]:
    norms = {}
    for module, size in base.layout.norms.items():
        if SAVED_BIAS in named.by_module.get(module, {}):
            raise AdapterUnsupported(
                f"the adapter replaces the bias of the norm {module}, which is not supported. Train it without "
                "bias='all', and without the norms in modules_to_save."
            )
        leaves = named.by_module.get(module, {})
        if not helper.saves_as(base.layout.spelled(module), is_held=SAVED in leaves):
            continue
        if SAVED not in leaves:
            raise AdapterMalformed(
                f"adapter_config.json says that {module} is saved (modules_to_save matches the ends of names), but the "
                "weights file has no tensor for it."
            )
        norms[module] = leaves.pop(SAVED)
        _check_vector(norms[module], infos, size, base)
    return norms


def _take_biases(
    helper: PEFTHelper, named: NamedTensors, infos: Infos, base: Base, targeted: Collection[str]
) -> dict[str, str]:
    if helper.bias == "none":
        return {}
    biases = {}
    wanted = set(targeted)
    for module in base.layout.linears:
        if module not in base.layout.biased or (helper.bias != "all" and module not in wanted):
            continue
        leaf = BASE_BIAS if module in wanted else SAVED_BIAS
        leaves = named.by_module.get(module, {})
        if leaf not in leaves:
            raise AdapterMalformed(
                f"adapter_config.json has bias={helper.bias!r}, but the weights file has no {leaf} of {module}."
            )
        biases[module] = leaves.pop(leaf)
        _check_vector(biases[module], infos, base.layout.linears[module][1], base)
    return biases


def _check_vector(name: str, infos: Infos, size: int, base: Base) -> None:
    if tensor_shape(name, infos) != (size,):
        raise AdapterMismatch(
            f"the tensor {shown(name)} has shape {shown(list(infos[name].shape))}; {base.named} expects {[size]}. "
            "The adapter was made for another model."
        )


def _targeted_linears(helper: PEFTHelper, named: NamedTensors, base: Base) -> dict[str, Spelled]:
    """Returns the targeted linears, each with its names in PEFT's patterns.

    From transformers 5 on, a router is a parameter that can be named, not a Linear layer as "all-linear" means.
    """
    targeted: dict[str, Spelled] = {}
    for module in yielding_gil(base.layout.linears):
        names, is_held = base.layout.spelled(module).beginning_with(named.spelled.get(module)), named.is_adapted(module)
        if helper.targets_as(names, is_held=is_held):
            targeted[module] = names
            continue
        names = base.layout.newest_names(module).of_parameter("weight")
        if helper.targets_parameter_as(names, is_held=is_held):
            check_variant(helper)
            targeted[module] = names
    routers = [module for module in targeted if base.layout.is_router(module)]
    if helper.all_linear and not any(router in named.by_module for router in routers):
        targeted = {module: name for module, name in targeted.items() if module not in routers}
    return targeted


def _check_parameters(helper: PEFTHelper, base: Base) -> None:
    """Raises AdapterUnsupported for target_parameters that are not served. PEFT only warns about unknown names."""
    layout = base.layout
    served = {f"{name}.weight" for module in layout.linears for name in layout.newest_names(module).all}
    if layout.experts is not None:
        for module in layout.experts.modules:
            for leaf in layout.experts.parameters:
                served.update(layout.newest_names(f"{module}.{leaf}").all)
    others = {f"{name}.weight" for module in (*layout.norms, *TABLES) for name in layout.newest_names(module).all}
    for name in helper.names("target_parameters"):
        ending = f".{name}"
        matches = [parameter == name or parameter.endswith(ending) for parameter in served]
        if layout.experts is not None and name == _USUAL_ROUTER and not any(matches):
            continue
        if not any(matches) or any(parameter == name or parameter.endswith(ending) for parameter in others):
            raise AdapterUnsupported(
                f"target_parameters has {shown(name)}; a name there must match parameters of the linears or experts of "
                f"{base.named}. This one matches none of them, or other parameters too."
            )


def _check_targets(targeted: Collection[str], named: NamedTensors) -> None:
    """Raises AdapterMalformed for missing or stray tensors, where PEFT only warns and serves the base's weights."""
    missing = [module for module in targeted if not named.by_module.get(module)]
    if missing:
        raise AdapterMalformed(
            f"adapter_config.json targets {missing[0]} ({len(missing)} modules in all), but the weights file has no "
            "tensors for it."
        )
    wanted = set(targeted)
    stray = sorted(module for module, leaves in named.by_module.items() if leaves and module not in wanted)
    if stray:
        first = next(iter(named.by_module[stray[0]].values()))
        raise AdapterMalformed(
            f"the weights file has tensors for {stray[0]} ({len(stray)} modules in all; {shown(first)}), which "
            "adapter_config.json does not target (target_modules, exclude_modules, layers_to_transform) and does not "
            "save (modules_to_save, bias)."
        )
