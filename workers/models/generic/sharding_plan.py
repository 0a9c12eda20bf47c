"""Reads how ranks divide a module of transformers: the tensor-parallel plan of its class and config.

A plan names linears and experts by patterns such as "layers.*.mlp.up_proj", and says of each whether ranks divide its
outputs (colwise) or its inputs (rowwise). Everything else is whole on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from lorafleet.protocol.errors import ConfigError, UnsupportedModel
from lorafleet.workers.bases.projection import Projection, Units
from lorafleet.workers.models.generic.attention_probe import AttentionTraits, ProbedLinear
from lorafleet.workers.models.generic.module_paths import engine_path

SPLITS: Mapping[str, Literal["outputs", "inputs"]] = {
    "colwise": "outputs",
    "rowwise": "inputs",
    "colwise_gather_output": "outputs",
    "rowwise_split_input": "inputs",
}
GATHERED = ("colwise_gather_output", "rowwise_split_input")  # the styles of linears with whole inputs and outputs
WHOLE = ("replicated_with_grad_allreduce",)  # styles of modules that every rank holds whole
EXPERTS = "moe_tp_experts"  # the style of a module of experts, whose output is a sum over the ranks
EXPERT_STYLES = ("packed_colwise", "colwise", "rowwise")  # those of its parameters
KV_LINEARS = ("k_proj", "v_proj")
_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")


@dataclass(frozen=True, slots=True)
class ShardingPlan:
    """The division of a whole model."""

    projections: Mapping[str, Projection]  # of every linear that adapters may target, by engine name
    gathered: frozenset[str]  # divided linears whose inputs and outputs every rank has whole
    experts: Mapping[str, Mapping[str, str]]  # by path of a module of experts, the style of each of its parameters
    expert_size: int | None  # the intermediate size of each expert
    divides_heads: bool  # each rank attends with some of the heads
    refusal: str | None = None  # the reason why the model cannot be divided

    def check(self, architecture: str, attention: AttentionTraits, size: int) -> None:
        """Raises ConfigError, UnsupportedModel among them, if `size` ranks cannot divide the model."""
        if size == 1:
            return
        if self.refusal is not None:
            raise UnsupportedModel(
                f"tensor_parallel_size={size} is not supported for {architecture} with model_impl=transformers: "
                f"{self.refusal} Use tensor_parallel_size=1, with more replicas if one is too slow.",
                "tensor_parallel_size",
            )
        sizes = {
            f"{name} ({units.count})": units.count
            for name, projection in self.projections.items()
            if projection.split != "nothing"
            for units in (projection.outputs if projection.split == "outputs" else (projection.inputs,))
            if not (units == _kv_units(attention) and size % units.count == 0)  # then ranks share KV heads
        }
        if self.expert_size is not None:
            sizes[f"the experts' intermediate size ({self.expert_size})"] = self.expert_size
        for name, count in sizes.items():
            if count % size:
                raise ConfigError(
                    f"tensor_parallel_size={size} does not divide {architecture}'s {name}. Use a divisor of it.",
                    "tensor_parallel_size",
                )

    def local(self, attention: AttentionTraits, size: int) -> AttentionTraits:
        """Returns the attention of one rank."""
        if not self.divides_heads:
            return attention
        kv_heads = max(1, attention.num_kv_heads // size)
        return replace(attention, num_heads=attention.num_heads // size, num_kv_heads=kv_heads)


def read_plan(model: Any, root: str, linears: Mapping[str, ProbedLinear], attention: AttentionTraits) -> ShardingPlan:
    """Returns the plan of `model`, which may be empty.

    Args:
        root: The beginning of the paths of the decoder's modules, such as "model.".
        linears: The linears that adapters may target, by path.
    """
    styles = getattr(model.config, "base_model_tp_plan", None) or {}
    projections: dict[str, Projection] = {}
    gathered: set[str] = set()
    experts: dict[str, dict[str, str]] = {}
    refusal = None if styles else "transformers has no tensor-parallel plan (base_model_tp_plan) for its config."
    for path, linear in linears.items():
        style = styles.get(_pattern(path, root))
        projections[engine_path(path)] = _projection(path, linear, style, attention)
        if style in GATHERED:
            gathered.add(engine_path(path))
    for path, module in model.named_modules():
        style = styles.get(_pattern(path, root))
        parameters = {
            name: found
            for name, _ in module.named_parameters(recurse=False)
            if (found := styles.get(_pattern(f"{path}.{name}", root))) is not None
        }
        if style == EXPERTS:
            experts[path] = parameters
            refusal = refusal or _refusal_of_experts(path, module, parameters)
        elif parameters or (style not in (None, *WHOLE) and not (path in linears and style in SPLITS)):
            named = ", ".join([*parameters.values()] if parameters else [str(style)])
            refusal = refusal or f"transformers' plan divides {path} in a way that is not supported ({named})."
    sizes = {module.down_proj.shape[2] for path, module in model.named_modules() if path in experts and not refusal}
    in_attention = [
        projections[name].split != "nothing" and name not in gathered
        for path in linears
        if _is_in_attention(path, attention) and (name := engine_path(path))
    ]
    if len(set(in_attention)) > 1:
        refusal = refusal or "transformers' plan divides only some of its attention's linears."
    return ShardingPlan(projections, frozenset(gathered), experts, max(sizes, default=None), any(in_attention), refusal)


def _projection(path: str, linear: ProbedLinear, style: str | None, attention: AttentionTraits) -> Projection:
    inputs, outputs = Units(linear.in_features), Units(linear.out_features)
    if style is None or style not in SPLITS:
        return Projection(engine_path(path), inputs, (outputs,), linear.has_bias, split="nothing")
    if style not in GATHERED and _is_in_attention(path, attention):
        if style == "rowwise":
            inputs = _units(linear.in_features, attention.num_heads)
        elif path.rpartition(".")[2] in KV_LINEARS:
            outputs = _units(linear.out_features, attention.num_kv_heads)
        else:
            outputs = _units(linear.out_features, attention.num_heads)
    return Projection(engine_path(path), inputs, (outputs,), linear.has_bias, SPLITS[style])


def _units(features: int, heads: int) -> Units:
    """Returns the heads of a dimension, or single numbers if it is not made of them."""
    return Units(features) if features % heads else Units(heads, features // heads)


def _kv_units(attention: AttentionTraits) -> Units:
    return Units(attention.num_kv_heads, attention.head_dim)


def _is_in_attention(path: str, attention: AttentionTraits) -> bool:
    return path.startswith(tuple(f"{module}." for module in attention.modules))


def _refusal_of_experts(path: str, module: Any, styles: Mapping[str, str]) -> str | None:
    shapes = {name: parameter.ndim for name, parameter in module.named_parameters(recurse=False)}
    is_usual = getattr(module, "is_concatenated", True) and not getattr(module, "is_transposed", False)
    if not is_usual or styles.keys() != shapes.keys() or set(shapes.values()) != {3} or "down_proj" not in shapes:
        return f"the experts at {path} are stored in a way that is not supported."
    strange = sorted(set(styles.values()) - set(EXPERT_STYLES))
    return f"transformers' plan divides {path} in a way that is not supported ({strange[0]})." if strange else None


def _pattern(path: str, root: str) -> str:
    """Returns the name of a module in the plan, which numbers no layers."""
    return _NUMBER.sub("*", path.removeprefix(root))
