"""Turns IA3 adapters into scales of outputs and norms.

IA3 multiplies a projection's output, bias included, by a vector. For a feed-forward module it multiplies the input.
The engine cannot scale inputs, so an input scale is moved to where the input comes from:
- The scale of down_proj moves to up_proj.
- The scale of o_proj moves to v_proj.
- A scale that all readers of a norm share moves to the norm's weight.

If such a move would not be exact, the adapter is rejected.
Source: arXiv 2205.05638; PEFT 0.21's ia3/layer.py.
"""

# D in features · O out features

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lorafleet.protocol.errors import AdapterMalformed, AdapterUnsupported
from lorafleet.workers.adapters.base_layout import HEAD
from lorafleet.workers.adapters.forms import AdapterForms, LinearForm
from lorafleet.workers.adapters.kinds.kind import Base, Kind, Target
from lorafleet.workers.adapters.peft_helper import PEFTHelper

VECTOR = "ia3_l"
_ATTENTION_READERS = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))  # read input_layernorm; some families fuse them
_MLP_READERS = (("gate_proj", "up_proj"), ("gate_up_proj",))


def check_config(helper: PEFTHelper) -> None:
    modules = helper.fields.get("feedforward_modules")
    if modules is None:
        raise AdapterMalformed(
            "feedforward_modules is null, whose meaning in IA3 depends on the model family. Name the modules, or set "
            "it to []."
        )
    if not isinstance(modules, str):
        helper.names("feedforward_modules")


def _is_feedforward(target: Target) -> bool:
    """Returns whether IA3 scales the inputs. PEFT's rule is an ending of the name, or one regular expression."""
    modules = target.helper.fields["feedforward_modules"]
    if isinstance(modules, str):
        pattern = target.helper.pattern("feedforward_modules")
        return any(pattern.fullmatch(name, target.helper.budget) for name in target.spelled.all)
    endings = target.helper.names("feedforward_modules")
    return any(name.endswith(endings) for name in target.spelled.all)


def check(target: Target) -> int:
    target.expect_leaves(VECTOR)
    inputs, outputs = target.shape
    target.expect(VECTOR, *((1, inputs) if _is_feedforward(target) else (outputs, 1)))
    return 0


def forms(targets: Sequence[Target]) -> AdapterForms:
    outputs: dict[str, Tensor] = {}
    inputs: dict[str, Tensor] = {}
    for target in targets:
        (inputs if _is_feedforward(target) else outputs)[target.module] = target.float32(VECTOR).flatten()
    base = targets[0].base
    norms = _move(inputs, outputs, base)
    by_module = {target.module: target for target in targets}
    linears = {}
    for module, scale_O in outputs.items():
        target = by_module.get(module) or _untargeted(module, targets[0])
        bias_O = target.bias()
        linears[module] = LinearForm(out_scale_O=scale_O, bias_O=None if bias_O is None else scale_O * bias_O)
    return AdapterForms(linears, norms=norms)


def _untargeted(module: str, other: Target) -> Target:
    layout = other.base.layout
    return Target(
        *(module, layout.linears[module], {}, {}, {}, other.helper, other.base, other.max_rank),
        spelled=layout.spelled(module),
    )


def _move(inputs: dict[str, Tensor], outputs: dict[str, Tensor], base: Base) -> dict[str, Tensor]:
    """Moves the input scales into `outputs` or into norms, and returns the changed norms."""
    norms = {}
    if inputs and base.layout.is_generic:
        raise AdapterUnsupported(
            f"IA3 on the inputs of {next(iter(inputs))} (feedforward_modules) is not supported for a base that runs as "
            "transformers' own module (model_impl=transformers). Train it with feedforward_modules=[]."
        )
    for module in list(inputs):
        if module not in inputs:  # already moved with another reader of its norm
            continue
        scale_D = inputs[module]
        leaf = module.rpartition(".")[2]
        if leaf == "down_proj":
            _check_gate(module, base)
            _multiply(outputs, module, ("up_proj", "gate_up_proj"), scale_D, base)
        elif leaf == "o_proj":
            if base.layout.norms_values:
                raise AdapterUnsupported(
                    f"IA3 on the inputs of {module} (feedforward_modules) is not supported, since {base.named} norms "
                    "the values before they are attended to."
                )
            _multiply(outputs, module, ("v_proj", "qkv_proj"), _by_kv_head(scale_D, module, base), base)
        else:
            norm, readers = _norm_of(module, base)
            _check_same(module, readers, inputs, scale_D)
            for reader in readers:
                del inputs[reader]
            norms[norm] = _scaled_norm(norm, scale_D, base, module)
    return norms


def _check_gate(down: str, base: Base) -> None:
    """Raises AdapterUnsupported if no gate is multiplied with up_proj, whose outputs the activation changes then."""
    parent = down.rpartition(".")[0]
    if not {f"{parent}.gate_proj", f"{parent}.gate_up_proj"} & base.layout.linears.keys():
        raise AdapterUnsupported(
            f"IA3 on the inputs of {down} (feedforward_modules) is not supported for an MLP without a gate. Train it "
            "on its outputs."
        )


def _multiply(outputs: dict[str, Tensor], reader: str, names: Sequence[str], scale_O: Tensor, base: Base) -> None:
    """Multiplies the output scale of the module that `reader` reads.

    `names` are the possible names of that module. In a fused linear its outputs are the last part.
    """
    parent = reader.rpartition(".")[0]
    module = next((f"{parent}.{name}" for name in names if f"{parent}.{name}" in base.layout.linears), None)
    if module is None:
        raise AdapterUnsupported(f"IA3 on the inputs of {reader} (feedforward_modules) is not supported.")
    before = base.layout.linears[module][1] - len(scale_O)
    scale_O = torch.cat([torch.ones(before), scale_O])
    outputs[module] = outputs[module] * scale_O if module in outputs else scale_O


def _by_kv_head(scale_D: Tensor, module: str, base: Base) -> Tensor:
    """Returns o_proj's input scale as a scale of v_proj's outputs.

    Each query head's part of the input is a sum over the values of one KV head. Raises AdapterUnsupported unless all
    query heads of a KV head have the same scale.
    """
    heads, kv_heads = base.layout.attention_heads
    groups = scale_D.view(kv_heads, heads // kv_heads, -1)
    if not torch.equal(groups, groups[:, :1].expand_as(groups)):
        raise AdapterUnsupported(
            f"IA3 scales the inputs of {module} differently for query heads that share a KV head, which is not "
            "supported. Train it on v_proj instead."
        )
    return groups[:, 0].flatten()


def _norm_of(module: str, base: Base) -> tuple[str, tuple[str, ...]]:
    """Returns the norm that the module reads, and all modules that read that norm."""
    if not base.layout.can_scale_norms:
        raise AdapterUnsupported(
            f"IA3 on the inputs of {module} (feedforward_modules) is not supported for the norms of {base.named}. "
            "Train it on down_proj, as IA3 does by default."
        )
    if module == HEAD:
        return "norm", (HEAD,)
    parent, _, leaf = module.rpartition(".")
    layer = parent.rpartition(".")[0]
    before_mlp = f"{layer}.pre_feedforward_layernorm"
    if before_mlp not in base.layout.norms:
        before_mlp = f"{layer}.post_attention_layernorm"
    for norm, groups in ((f"{layer}.input_layernorm", _ATTENTION_READERS), (before_mlp, _MLP_READERS)):
        for readers in groups:
            if leaf in readers:
                return norm, tuple(f"{parent}.{reader}" for reader in readers)
    raise AdapterUnsupported(f"IA3 on the inputs of {module} (feedforward_modules) is not supported.")


def _check_same(module: str, readers: Sequence[str], inputs: Mapping[str, Tensor], scale_D: Tensor) -> None:
    for reader in readers:
        if reader not in inputs or not torch.equal(inputs[reader], scale_D):
            raise AdapterUnsupported(
                f"IA3 scales the inputs of {module} (feedforward_modules) differently from those of {reader}, which "
                "reads the same norm. That is not supported. Train it on down_proj, as IA3 does by default."
            )


def _scaled_norm(norm: str, scale_D: Tensor, base: Base, module: str) -> Tensor:
    if norm not in base.layout.norms or base.weights is None:
        raise AdapterUnsupported(
            f"IA3 on the inputs of {module} is not supported: the base's {norm}, which would take the scale, is not "
            "available."
        )
    offset = base.layout.norm_offset
    with base.weights.beside_the_steps():
        weight_D = base.weights.weight(norm).float().cpu()
    return (weight_D + offset) * scale_D - offset


IA3 = Kind("IA3", (VECTOR,), check, forms, (), check_config)
