"""Checks LoRA on the experts of a mixture by shape, and builds its form. The file has one of three layouts:

- Up to transformers 4, each expert is three Linear layers, such as "mlp.experts.3.gate_proj", which target_modules
  names.
- From transformers 5 on, all experts of a layer are two parameters, gate_up_proj (up_proj if there is no gate) and
  down_proj, which target_parameters names. PEFT wraps their module once for each, in that order. The depth of a
  tensor's name therefore tells which parameter it is for: "experts.base_layer.lora_A" or "experts.lora_A". A is
  [E * r, in] by expert, and B is [out, r * E] by rank. Where PEFT took in for out (ExpertsConfig.adapters_swapped),
  A is [E * r, out] and B is [in, r * E], and the change of an expert is the transposed product.
- Megatron-Bridge, Tinker and SGLang have three modules, each for one projection of all experts, such as
  "mlp.experts.w1" or "mlp.experts.gate_proj". A is [E, r, in] and B is [E, out, r]. A first dimension of 1 means that
  all experts share the matrix ("shared outer": A of gate and up, and B of down).
"""

# E experts · R rank · D in features · O out features · G groups of outputs

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch

from lorafleet.protocol.adapter_formats.safetensors_header import TensorInfo
from lorafleet.protocol.errors import AdapterMalformed, AdapterUnsupported
from lorafleet.protocol.strict_json import shown
from lorafleet.protocol.yield_gil import yielding_gil
from lorafleet.workers.adapters.base_layout import BATCHED_NAMES, BaseLayout, ExpertsLayout
from lorafleet.workers.adapters.expert_factors import ExpertFactors, FactorPiece
from lorafleet.workers.adapters.forms import ExpertsForm, StackedLowRank
from lorafleet.workers.adapters.kinds import mutated_base
from lorafleet.workers.adapters.kinds.kind import Base, Target
from lorafleet.workers.adapters.kinds.lora import KASA, A, B
from lorafleet.workers.adapters.kinds.pairs import check_pair
from lorafleet.workers.adapters.peft_helper import PEFTHelper
from lorafleet.workers.adapters.peft_names import NamedTensors
from lorafleet.workers.adapters.spellings import Spelled

_VARIANTS = {
    "use_dora": "DoRA",
    "use_bdlora": "block-diagonal LoRA",
    "lora_bias": "a bias on lora_B",
    "velora_config": "VeLoRA",
}


@dataclass(slots=True)
class ExpertTargets:
    """The targeted experts of one layer."""

    layout: ExpertsLayout
    stacked: dict[str, Target] = field(default_factory=dict)  # by parameter, each for all experts
    single: dict[str, list[Target]] = field(default_factory=dict)  # by projection, one for each expert

    def targets(self) -> Iterator[Target]:
        yield from self.stacked.values()
        for targets in self.single.values():
            yield from targets

    def form(self) -> ExpertsForm:
        if self.single:
            return ExpertsForm(*(_joined(self.single, leaves) for leaves in self.layout.parameters.values()))
        parameters = self.layout.parameters.items()
        return ExpertsForm(
            *(_unstacked(self.stacked.get(name), self.layout, len(leaves)) for name, leaves in parameters)
        )


def take_experts(
    helper: PEFTHelper, named: NamedTensors, infos: Mapping[str, TensorInfo], base: Base, max_rank: int
) -> dict[str, ExpertTargets]:
    """Returns the targeted experts by module, such as "layers.0.mlp.experts", and takes their tensors out of `named`.

    Raises the errors of AdapterParts.of.
    """
    layout = base.layout.experts
    if layout is None:
        return {}
    own = NamedTensors({m: named.by_module.pop(m) for m in list(named.by_module) if layout.has(m)}, named.shared)

    def target(module: str, shape: tuple[int, int], spelled: Spelled) -> Target:
        return Target(
            module, shape, own.by_module.pop(module), own.shared, infos, helper, base, max_rank, spelled=spelled
        )

    found: dict[str, ExpertTargets] = {}
    for module in sorted(layout.modules):
        targets = ExpertTargets(layout)
        for name, (wrapped, spelled) in _stacked_modules(helper, module, base.layout, own).items():
            _check_present([wrapped], own)
            targets.stacked[name] = target(wrapped, _stacked_shape(name, layout), spelled)
        for leaf, (name, spelled) in _batched_modules(helper, module, base, own).items():
            targets.single[leaf] = [target(name, layout.shapes[leaf], spelled)]
        for leaf, names in _single_modules(helper, module, base, own, targets.single.keys()).items():
            _check_present(list(names), own)
            targets.single[leaf] = [target(name, layout.shapes[leaf], spelled) for name, spelled in names.items()]
        if targets.stacked and targets.single:
            raise AdapterUnsupported(
                f"{module} is targeted both as parameters and expert by expert; PEFT does not support that either."
            )
        if targets.stacked or targets.single:
            found[module] = targets
    if own.by_module:
        stray = min(own.by_module)
        raise AdapterMalformed(
            f"the weights file has tensors for {stray} ({len(own.by_module)} modules in all; "
            f"{shown(next(iter(own.by_module[stray].values())))}), which adapter_config.json does not target "
            f"(target_modules, target_parameters)."
        )
    if found:
        check_variant(helper)
    return found


def check_experts(experts: ExpertTargets) -> dict[str, int]:
    """Checks the shapes, and returns the ranks by the names of the projections or parameters."""
    for target in experts.stacked.values():
        _check_stacked(target)
    for targets in experts.single.values():
        for target in yielding_gil(targets):
            target.expect_leaves(A, B)
            if _is_batched(target):
                _check_batched(target)
            else:
                check_pair(target, A, B, target.rank)
    return {expert_name(target): target.rank for target in experts.targets()}


def expert_name(target: Target) -> str:
    """Returns the name of the target's projection or parameter for messages."""
    return target.spelled.name.removeprefix("model.")


def _stacked_modules(
    helper: PEFTHelper, module: str, layout: BaseLayout, named: NamedTensors
) -> dict[str, tuple[str, Spelled]]:
    """Returns the targeted parameters, each with the module that PEFT names its tensors after, and its names in PEFT's
    patterns.

    The parameter that is wrapped first lies deepest.
    """
    assert layout.experts is not None
    is_held = module in named.by_module
    targeted: dict[str, Spelled] = {}
    for parameter in layout.experts.parameters:
        spelled = layout.newest_names(f"{module}.{parameter}")
        if helper.targets_parameter_as(spelled, is_held=is_held):
            targeted[parameter] = spelled
    depth = len(targeted)
    return {
        parameter: (module + ".base_layer" * (depth - 1 - i), spelled)
        for i, (parameter, spelled) in enumerate(targeted.items())
    }


def _stacked_shape(name: str, layout: ExpertsLayout) -> tuple[int, int]:
    """Returns (in, out) of the parameter, as PEFT took them."""
    leaves = layout.parameters[name]
    inputs, outputs = layout.shapes[leaves[0]]
    outputs *= len(leaves)
    return (outputs, inputs) if layout.swapped else (inputs, outputs)


def _batched_modules(
    helper: PEFTHelper, module: str, base: Base, named: NamedTensors
) -> dict[str, tuple[str, Spelled]]:
    """Returns the projections that are one module for all experts, each with that module and its names in PEFT's
    patterns. Modules that the config does not target are left out, and are strays then."""
    layout = base.layout.experts
    assert layout is not None
    found: dict[str, tuple[str, Spelled]] = {}
    for name in (*layout.shapes, *BATCHED_NAMES):
        leaf, batched = BATCHED_NAMES.get(name, name), f"{module}.{name}"
        if batched not in named.by_module:
            continue
        names = (base.layout.newest_names(batched), base.layout.newest_names(f"{module}.{leaf}"))
        targeted = [spelled for spelled in names if helper.targets_as(spelled, is_held=True)]
        if targeted:
            if leaf in found:
                raise AdapterMalformed(f"{found[leaf][0]} and {batched} are the same projection. Remove one of them.")
            found[leaf] = batched, targeted[0]
    return found


def _is_batched(target: Target) -> bool:
    """Returns whether the module is for all experts, whose numbers are not in its name."""
    return not target.module.split(".")[-2].isdigit()


def _check_batched(target: Target) -> None:
    assert target.base.layout.experts is not None
    count, (inputs, outputs) = target.base.layout.experts.count, target.shape
    for leaf, rows, columns in ((A, target.rank, inputs), (B, outputs, target.rank)):
        is_shared = target.shape_of(leaf)[:1] == (1,)
        target.expect(leaf, 1 if is_shared else count, rows, columns)


def _single_modules(
    helper: PEFTHelper, module: str, base: Base, named: NamedTensors, batched: Collection[str]
) -> dict[str, dict[str, Spelled]]:
    """Returns the targeted projections except those that are batched, each with its experts' modules and their names in
    PEFT's patterns.

    "all-linear" or a name that dense MLPs have too, such as "gate_proj", or LFM2's "w1", did not mean these modules if
    the file has none of them and the base's newest transformers class does not have them either.
    """
    layout = base.layout.experts
    assert layout is not None
    found: dict[str, dict[str, Spelled]] = {}
    dense = {name.rpartition(".")[2] for name in base.layout.linears}
    for leaf in (leaf for leaf in layout.shapes if leaf not in batched):
        names: dict[str, Spelled] = {}
        for number in range(layout.count):
            name = layout.expert(module, number, leaf)
            spelled = base.layout.older_names(name)
            if helper.targets_as(spelled, is_held=name in named.by_module):
                names[name] = spelled
        is_shared = all(spelled.name.rpartition(".")[2] in {leaf, *dense} for spelled in names.values())
        by_type = helper.all_linear or is_shared
        if names and not (by_type and not any(name in named.by_module for name in names)):
            found[leaf] = names
    return found


def _check_present(modules: Sequence[str], named: NamedTensors) -> None:
    missing = [module for module in modules if module not in named.by_module]
    if missing:
        raise AdapterMalformed(
            f"adapter_config.json targets {missing[0]} ({len(missing)} experts in all), but the weights file has no "
            "tensors for it."
        )


def check_variant(helper: PEFTHelper) -> None:
    """Raises AdapterUnsupported for variants that PEFT cannot use on parameters; no experts are served with them."""
    variant = next((name for key, name in _VARIANTS.items() if helper.is_set(key)), None)
    if variant is None and helper.has_object(KASA):
        variant = "KaSA"
    if variant is None and helper.method != "LORA":
        variant = helper.method
    if variant is None and mutated_base.is_named(helper):
        variant = f"init_lora_weights={shown(helper.fields.get('init_lora_weights'))}"
    if variant is not None:
        raise AdapterUnsupported(
            f"{variant} on experts or parameters is not supported; PEFT 0.21 supports only plain LoRA there."
        )


def _check_stacked(target: Target) -> None:
    assert target.base.layout.experts is not None
    count, rank, (inputs, outputs) = target.base.layout.experts.count, target.rank, target.shape
    target.expect_leaves(A, B)
    target.expect(A, count * rank, inputs)
    target.expect(B, outputs, rank * count)


def _unstacked(target: Target | None, layout: ExpertsLayout, projections: int) -> StackedLowRank | None:
    if target is None:
        return None
    count, rank, (inputs, outputs) = layout.count, target.rank, target.shape
    scaling = target.scaling
    a_ERD = target.value(A).view(count, rank, inputs)
    b_EOR = target.value(B).view(outputs, rank, count).permute(2, 0, 1)
    if layout.swapped:
        a_ERD, b_EOR = b_EOR.transpose(1, 2), a_ERD.transpose(1, 2)
    if layout.interleaved:
        b_EPOR = b_EOR.unflatten(1, (-1, projections)).transpose(1, 2)
    else:
        b_EPOR = b_EOR.unflatten(1, (projections, -1))
    return StackedLowRank(
        ExpertFactors.of(a_ERD.unsqueeze(1)), ExpertFactors.of(b_EPOR), torch.full((count, 1), scaling)
    )


def _joined(single: Mapping[str, list[Target]], leaves: tuple[str, ...]) -> StackedLowRank | None:
    """Returns the experts' pairs as one stack, with one group per projection.

    Experts that are not targeted have zeros, and so have ranks that are smaller than others.
    """
    groups = [(g, target) for g, leaf in enumerate(leaves) for target in single.get(leaf, ())]
    if not groups:
        return None
    layout = groups[0][1].base.layout.experts
    assert layout is not None
    rank, (inputs, outputs) = max(target.rank for _, target in groups), layout.shapes[leaves[0]]
    a: list[FactorPiece] = []
    b: list[FactorPiece] = []
    scaling_EG = torch.zeros(layout.count, len(leaves))
    for g, target in yielding_gil(groups):
        first, count = (0, layout.count) if _is_batched(target) else (int(target.module.split(".")[-2]), 1)
        for pieces, leaf in ((a, A), (b, B)):
            pieces.append(FactorPiece(first, g, target.value(leaf).expand(count, -1, -1).unsqueeze(1)))
        scaling_EG[first : first + count, g] = target.scaling
    dtype = _promoted([*a, *b])
    return StackedLowRank(
        ExpertFactors((layout.count, len(leaves), rank, inputs), dtype, a),
        ExpertFactors((layout.count, len(leaves), outputs, rank), dtype, b),
        scaling_EG,
    )


def _promoted(pieces: Iterable[FactorPiece]) -> torch.dtype:
    """Returns the dtype that holds the values of all pieces."""
    return reduce(torch.promote_types, {piece.values_EGXY.dtype for piece in pieces})
