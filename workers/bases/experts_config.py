"""Describes a mixture of experts: its router, its experts, the shared expert beside them, and how files store them.

Families fill an ExpertsConfig. Fields whose names end in _name are module paths behind the layer's and
ExpertsConfig.prefix, as the engine names them: "layers.3.mlp." as a rule.
"""

# D hidden size · I intermediate size

from __future__ import annotations

from dataclasses import dataclass, replace

from lorafleet.kernels.moe.expert_activation import ExpertActivation, is_gated
from lorafleet.kernels.moe.routing_rule import ExpertGroups, RoutingRule, Scores
from lorafleet.protocol.errors import ConfigError
from lorafleet.workers.bases.projection import Projection, Units

LATENT_IN, LATENT_OUT = "fc1_latent_proj", "fc2_latent_proj"  # names of the linears around latent experts


@dataclass(frozen=True, slots=True)
class SharedExpertConfig:
    """A dense MLP that every token passes, beside the chosen experts. It has their activation and no biases."""

    intermediate_size: int  # Of all shared experts together, if the family counts several.
    module_name: str = "shared_experts"
    fused_name: str | None = None  # Linear of gate and up together; None: gate_proj and up_proj are two.
    down_name: str = "down_proj"
    gate_name: str | None = None  # Linear [1, D] whose sigmoid multiplies the output; None: the output counts once.


@dataclass(frozen=True, slots=True)
class BesideMLP:
    """The names below the layer of what a mixture has beside a dense MLP. Both read the same residual, through a norm
    of their own. LayerNorms.after_mlp norms their sum."""

    dense_out_norm: str  # Norms the dense MLP's output.
    in_norm: str  # Norms the experts' input.
    out_norm: str  # Norms the experts' output.
    router_scale: str  # Vector [D]: the router's input is norm(residual) * router_scale / sqrt(D).

    @property
    def norms(self) -> tuple[str, ...]:
        return self.dense_out_norm, self.in_norm, self.out_norm


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts that replaces a layer's MLP, or stands beside it."""

    count: int  # Experts of each layer.
    per_token: int  # Experts chosen for a token.
    intermediate_size: int
    sums_to_one: bool  # The chosen scores are divided by their sum; with softmax, this is the chosen logits' softmax.
    layers: frozenset[int]  # Layers that have the mixture.
    prefix: str = "mlp."  # Of the names of the mixture's modules below the layer.
    beside: BesideMLP | None = None  # None: the mixture replaces the MLP.

    scores: Scores = "softmax"  # Scores of the experts, computed from logits in float32.
    nearness: float = 0.0  # As in RoutingRule.
    groups: ExpertGroups | None = None  # Experts are chosen from a token's best groups; None: from all experts.
    scaling: float = 1.0  # Multiplies the weights of the chosen experts (routed_scaling_factor).
    scales_input: bool = False  # The weights multiply the experts' inputs, as in Llama 4, and not their outputs.
    correction_name: str | None = None  # Vector that is added to the scores for the choice alone; None: there is none.
    expert_scale_name: str | None = None  # Vector that multiplies the chosen experts' weights; None: there is none.
    router_bias: bool = False
    router_float32: bool = False  # The router's weight, input and logits are float32, whatever the model's dtype is.
    router_name: str = "gate"

    activation: ExpertActivation = "silu"
    biases: bool = False  # Experts have biases.
    # Size of the latent vectors that experts read and write. A linear before them computes these from the hidden state,
    # and one behind them computes the output. None: experts read the hidden state.
    latent_size: int | None = None
    shared: SharedExpertConfig | None = None

    # How files hold all experts of a layer in one tensor, and how adapters see it.
    transposed: bool = False  # Matrices are [E, in, out], else [E, out, in].
    interleaved: bool = False  # Rows of gate and up alternate, else gate's come before up's.
    adapters_swapped: bool = False  # PEFT took [E, in, out] for [E, out, in], as it does for Llama 4.

    def __post_init__(self) -> None:
        """Raises ConfigError if the router cannot choose as many experts."""
        if self.per_token > self.count:
            raise ConfigError(
                f"config.json has num_experts_per_tok={self.per_token}, more than its {self.count} experts.", "model"
            )
        if self.groups is not None:
            _check_groups(self.groups, self.count, self.per_token)

    @property
    def rule(self) -> RoutingRule:
        return RoutingRule(self.per_token, self.sums_to_one, self.scores, self.groups, self.scaling, self.nearness)

    @property
    def is_gated(self) -> bool:
        return is_gated(self.activation)

    @property
    def first_leaves(self) -> tuple[str, ...]:
        """The projections of an expert that its first linear computes together, in the order of its rows."""
        return ("gate_proj", "up_proj") if self.is_gated else ("up_proj",)

    def expert_shapes(self, hidden_size: int) -> dict[str, tuple[int, int]]:
        """Returns (in, out) of each expert's projections, in the order of gate_up's rows, down last."""
        inner, outer = self.intermediate_size, self.latent_size or hidden_size
        return dict.fromkeys(self.first_leaves, (outer, inner)) | {"down_proj": (inner, outer)}

    def packed(self, hidden_size: int) -> tuple[tuple[Projection, ...], ...]:
        """Returns the linears beside the experts, grouped into those that one GEMM computes together: the router,
        those before and behind latent experts, then those of the shared expert."""
        hidden = Units(hidden_size)
        router = Projection(
            self.prefix + self.router_name, hidden, (Units(self.count),), self.router_bias, split="nothing"
        )
        found: tuple[tuple[Projection, ...], ...] = ((router,),)
        if self.latent_size is not None:
            latent = Units(self.latent_size)
            names = self.prefix + LATENT_IN, self.prefix + LATENT_OUT
            into = Projection(names[0], hidden, (latent,), split="nothing")
            out = Projection(names[1], latent, (hidden,), split="nothing", reads_part=True)
            found += (into,), (out,)
        if self.shared is None:
            return found
        module, inner = self.prefix + self.shared.module_name, Units(self.shared.intermediate_size)
        leaves = self.first_leaves
        first = tuple(Projection(f"{module}.{leaf}", hidden, (inner,)) for leaf in leaves)
        if self.shared.fused_name is not None:
            first = (Projection(f"{module}.{self.shared.fused_name}", hidden, (inner,) * len(leaves)),)
        down = Projection(f"{module}.{self.shared.down_name}", inner, (hidden,), split="inputs")
        if self.shared.gate_name is None:
            return *found, first, (down,)
        gate = Projection(self.prefix + self.shared.gate_name, hidden, (Units(1),), split="nothing")
        return *found, first, (down,), (gate,)

    @property
    def router_modules(self) -> frozenset[str]:
        """Module paths, below the model, of the linears whose outputs weight experts. They are never quantized."""
        gate = None if self.shared is None else self.shared.gate_name
        names = [name for name in (self.router_name, gate) if name is not None]
        return frozenset(f"layers.{layer}.{self.prefix}{name}" for layer in self.layers for name in names)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that tensor parallelism divides, by their names in messages."""
        sizes = {"moe_intermediate_size": self.intermediate_size}
        if self.shared is not None:
            sizes["shared expert's intermediate_size"] = self.shared.intermediate_size
        return sizes

    def divided(self, ranks: int) -> ExpertsConfig:
        """Returns the part of one rank of a tensor-parallel group. All sizes are multiples of `ranks`."""
        shared = self.shared
        if shared is not None:
            shared = replace(shared, intermediate_size=shared.intermediate_size // ranks)
        return replace(self, intermediate_size=self.intermediate_size // ranks, shared=shared)


def _check_groups(groups: ExpertGroups, count: int, per_token: int) -> None:
    size = count // groups.count
    if count % groups.count or size < 2 or groups.per_token > groups.count or groups.per_token * size < per_token:
        raise ConfigError(
            f"config.json has n_group={groups.count} and topk_group={groups.per_token} for {count} experts with "
            f"{per_token} chosen for a token. Groups must be equal, have 2 experts or more, and {groups.per_token} of "
            "them must hold the chosen experts.",
            "model",
        )
