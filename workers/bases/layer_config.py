"""Describes one layer of a decoder: its attention or recurrence, its MLP, and where its norms stand.

A family (workers/bases/families/) builds these descriptions from a config.json. The decoder is built from them, and the
sizes of all linears, the names of adapters' modules and the division among ranks are derived from them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from lorafleet.kernels.decoder.gated_mul import Activation
from lorafleet.kernels.decoder.rope_store import RowHeads
from lorafleet.workers.bases.projection import Projection, Units
from lorafleet.workers.bases.recurrence_config import Mamba2Config, ShortConvConfig, StateShape
from lorafleet.workers.bases.rope_config import RopeConfig

# The linears of a delta net in the checkpoint. "grouped": in_proj_qkvz and in_proj_ba, whose outputs are ordered by key
# head. "split": in_proj_qkv, in_proj_z, in_proj_b and in_proj_a. "apart": q_proj, k_proj, v_proj, g_proj, b_proj and
# a_proj. There o_proj is the last linear's name, and the convolution is three too, q_conv1d to v_conv1d.
DeltaNetLayout = Literal["grouped", "split", "apart"]
# "head": each head of q and k is normed, before the rotation. "head_after": the same after the rotation. "row": all
# heads of a token are normed together, before the rotation.
QKNorm = Literal["head", "head_after", "row"]


@dataclass(frozen=True, slots=True)
class QueryTemperature:
    """Scales the query at position p by 1 + scale * log(1 + floor((p + offset) / period))."""

    scale: float
    period: float
    offset: int = 0


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """The attention of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # multiplies q.k
    rope: RopeConfig | None  # None: the layer rotates nothing
    window: int | None = None  # tokens that a query sees, including its own; None means all
    chunk: int | None = None  # a query sees its own chunk of this many positions only; None means all
    softcap: float | None = None  # bounds the scores, see LayerAttention
    has_sinks: bool = False  # each head has a logit that belongs to no key, in self_attn.sinks of the checkpoint
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: QKNorm | None = None
    # None: the norms of q and k have no weights.
    qk_norm_names: tuple[str, str] | None = ("self_attn.q_norm", "self_attn.k_norm")
    value_norm: bool = False  # each head of v has an RMS norm without a weight
    k_is_v: bool = False  # there is no v_proj: v is k_proj's output, before k's norm and rotation
    # An earlier layer whose keys and values this one reads. It then has projections of the query only.
    cache_layer: int | None = None
    temperature: QueryTemperature | None = None
    is_fused: bool = False  # q, k and v are one linear in the checkpoint, self_attn.qkv_proj
    # q_proj has a gate behind each head's query, whose sigmoid multiplies the head's result
    has_output_gate: bool = False
    o_name: str = "self_attn.o_proj"

    def __post_init__(self) -> None:
        is_special = self.is_fused or self.qk_norm == "row"
        assert not is_special or self.row_heads == "qkv"
        assert not self.has_output_gate or self.row_heads == "qgkv"

    @property
    def row_heads(self) -> RowHeads:
        """The parts of q, k and v that the layer's first linear computes."""
        if self.cache_layer is not None:
            return "q"
        if self.k_is_v:
            return "qk"
        return "qgkv" if self.has_output_gate else "qkv"

    @property
    def absent(self) -> tuple[str, ...]:
        """Names of modules that the layer would have if it did not read an earlier layer's cache. Checkpoints and
        adapters may have tensors of them, which have no effect in transformers either."""
        if self.cache_layer is None:
            return ()
        return "self_attn.k_proj", "self_attn.v_proj", *(self.qk_norm_names or ())[1:]

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def packed(self, hidden_size: int) -> tuple[tuple[Projection, ...], ...]:
        """Returns the projections, grouped into those that one GEMM computes together."""
        hidden = Units(hidden_size)
        heads, kv_heads = Units(self.num_heads, self.head_dim), Units(self.num_kv_heads, self.head_dim)
        o = Projection(self.o_name, heads, (hidden,), self.o_bias, split="inputs")
        if self.is_fused:
            outputs = heads, kv_heads, kv_heads
            return (Projection("self_attn.qkv_proj", hidden, outputs, self.qkv_bias),), (o,)
        queries = Units(self.num_heads, self.head_dim * (2 if self.has_output_gate else 1))
        parts = {part: queries if part == "q" else kv_heads for part in self.row_heads if part != "g"}
        qkv = (Projection(f"self_attn.{part}_proj", hidden, (units,), self.qkv_bias) for part, units in parts.items())
        return tuple(qkv), (o,)

    def norm_sizes(self) -> dict[str, int]:
        """Returns the sizes of the norms inside the attention, by module path below the layer."""
        if self.qk_norm is None or self.qk_norm_names is None:
            return {}
        rows = (self.q_size, self.kv_size) if self.qk_norm == "row" else (self.head_dim,) * 2
        sizes = dict(zip(self.qk_norm_names, rows, strict=True))
        return {name: size for name, size in sizes.items() if name not in self.absent}

    def divided(self, ranks: int) -> AttentionConfig:
        """Returns the part of one rank of a tensor-parallel group."""
        return replace(self, num_heads=self.num_heads // ranks, num_kv_heads=max(1, self.num_kv_heads // ranks))


@dataclass(frozen=True, slots=True)
class LatentAttentionConfig:
    """Multi-head latent attention (MLA): the keys and values of all heads are projections of one latent vector.

    The cache holds each token's latent and one rotated key that all heads share.
    Source: DeepSeek-V2, arXiv 2405.04434.
    """

    num_heads: int
    latent_dim: int  # numbers of the latent vector (kv_lora_rank)
    nope_dim: int  # numbers of each head's query and key that are not rotated
    rope_dim: int  # numbers of each head's query that are rotated, and of the shared key
    value_dim: int  # numbers of each head's value
    scale: float  # multiplies q.k
    rope: RopeConfig
    q_rank: int | None = None  # q_proj is a product of two linears with this many numbers between them; None: it is one
    a_bias: bool = False  # of q_a_proj and kv_a_proj_with_mqa
    o_bias: bool = False
    norm_eps: float = 1e-6  # of the norms between the linears; the model's own eps does not apply to them

    @property
    def num_kv_heads(self) -> int:
        """The cached vector is one head for all query heads, and the same on every rank."""
        return 1

    @property
    def cached_dim(self) -> int:
        return self.latent_dim + self.rope_dim

    def packed(self, hidden_size: int) -> tuple[tuple[Projection, ...], ...]:
        """Returns the projections, grouped into those that one GEMM computes together."""
        hidden, latent = Units(hidden_size), Units(self.latent_dim)
        queries = (Units(self.num_heads, self.nope_dim + self.rope_dim),)
        kv_a = Projection(
            "self_attn.kv_a_proj_with_mqa", hidden, (Units(self.cached_dim),), self.a_bias, split="nothing"
        )
        keys_and_values = (Units(self.num_heads, self.nope_dim + self.value_dim),)
        kv_b = Projection("self_attn.kv_b_proj", latent, keys_and_values, is_absorbed=True)
        o = Projection("self_attn.o_proj", Units(self.num_heads, self.value_dim), (hidden,), self.o_bias, "inputs")
        if self.q_rank is None:
            return (Projection("self_attn.q_proj", hidden, queries),), (kv_a,), (kv_b,), (o,)
        q_latent = Units(self.q_rank)
        q_a = Projection("self_attn.q_a_proj", hidden, (q_latent,), self.a_bias, split="nothing")
        return (Projection("self_attn.q_b_proj", q_latent, queries),), (q_a, kv_a), (kv_b,), (o,)

    def norm_sizes(self) -> dict[str, int]:
        """Returns the sizes of the norms inside the attention, by module path below the layer."""
        sizes = {} if self.q_rank is None else {"self_attn.q_a_layernorm": self.q_rank}
        return sizes | {"self_attn.kv_a_layernorm": self.latent_dim}

    def divided(self, ranks: int) -> LatentAttentionConfig:
        """Returns the part of one rank of a tensor-parallel group."""
        return replace(self, num_heads=self.num_heads // ranks)


AnyAttention = AttentionConfig | LatentAttentionConfig


@dataclass(frozen=True, slots=True)
class DeltaNetConfig:
    """Describes a recurrent layer, which has a gated delta rule behind a short convolution (kernels/recurrent/).

    Each key head serves num_v_heads / num_k_heads consecutive value heads. Modules are below linear_attn.
    Source: Gated DeltaNet, arXiv 2412.06464.
    """

    num_k_heads: int
    num_v_heads: int
    k_dim: int  # numbers of a query and of a key
    v_dim: int  # numbers of a value
    conv_size: int  # tokens that the convolution reads, with the current one
    layout: DeltaNetLayout = "split"
    beta_scale: float = 1.0  # multiplies beta, see HeadGates
    norm_eps: float | None = None  # of the gated norm; None: as in all norms of the model

    @property
    def v_heads_per_k_head(self) -> int:
        return self.num_v_heads // self.num_k_heads

    @property
    def conv_units(self) -> tuple[Units, ...]:
        """The channels of the convolution: queries, keys, values."""
        keys = Units(self.num_k_heads, self.k_dim)
        return keys, keys, Units(self.num_v_heads, self.v_dim)

    @property
    def num_channels(self) -> int:
        return sum(units.total for units in self.conv_units)

    @property
    def state(self) -> StateShape:
        return StateShape((self.num_channels, self.conv_size - 1), (self.num_v_heads, self.k_dim, self.v_dim))

    @property
    def divided_sizes(self) -> dict[str, int]:
        """The sizes that tensor parallelism divides, by their names in messages."""
        return {"linear_num_key_heads": self.num_k_heads}

    def packed(self, hidden_size: int) -> tuple[tuple[Projection, ...], ...]:
        """Returns the projections, grouped into those that one GEMM computes together."""
        hidden, values = Units(hidden_size), Units(self.num_v_heads, self.v_dim)
        out_name = "linear_attn.o_proj" if self.layout == "apart" else "linear_attn.out_proj"
        out = Projection(out_name, values, (hidden,), split="inputs")
        ratio = self.v_heads_per_k_head
        if self.layout == "grouped":
            qkvz = Units(self.num_k_heads, 2 * self.k_dim + 2 * ratio * self.v_dim)
            ba = Units(self.num_k_heads, 2 * ratio)
            return (
                (Projection("linear_attn.in_proj_qkvz", hidden, (qkvz,)),),
                (Projection("linear_attn.in_proj_ba", hidden, (ba,)),),
                (out,),
            )
        if self.layout == "apart":
            numbers = *self.conv_units, values, Units(self.num_v_heads), Units(self.num_v_heads)
            q, k, v, g, b, a = (
                Projection(f"linear_attn.{part}_proj", hidden, (units,))
                for part, units in zip("qkvgba", numbers, strict=True)
            )
            return (q, k, v), (g, b, a), (out,)
        qkv = Projection("linear_attn.in_proj_qkv", hidden, self.conv_units)
        z = Projection("linear_attn.in_proj_z", hidden, (values,))
        b, a = (Projection(f"linear_attn.in_proj_{name}", hidden, (Units(self.num_v_heads),)) for name in "ba")
        return (qkv, z), (b, a), (out,)

    def norm_sizes(self) -> dict[str, int]:
        """Returns no sizes, since adapters cannot replace the gated norm."""
        return {}

    def divided(self, ranks: int) -> DeltaNetConfig:
        """Returns the part of one rank of a tensor-parallel group. Both numbers of heads are multiples of `ranks`."""
        return replace(self, num_k_heads=self.num_k_heads // ranks, num_v_heads=self.num_v_heads // ranks)


Recurrence = DeltaNetConfig | Mamba2Config | ShortConvConfig


@dataclass(frozen=True, slots=True)
class ParallelMixerConfig:
    """Attention and a state space that read the same norm's output, and whose results are added."""

    attention: AttentionConfig
    mamba: Mamba2Config
    attention_in: float = 1.0  # multiplies the attention's input
    attention_out: float = 1.0  # multiplies the attention's output
    mamba_out: float = 1.0  # multiplies the state space's output

    def packed(self, hidden_size: int) -> tuple[tuple[Projection, ...], ...]:
        """Returns the projections of both, grouped into those that one GEMM computes together."""
        return *self.attention.packed(hidden_size), *self.mamba.packed(hidden_size)

    def norm_sizes(self) -> dict[str, int]:
        """Returns the sizes of the norms inside the attention, by module path below the layer."""
        return self.attention.norm_sizes()

    def divided(self, ranks: int) -> ParallelMixerConfig:
        """Returns the part of one rank of a tensor-parallel group."""
        return replace(self, attention=self.attention.divided(ranks), mamba=self.mamba.divided(ranks))


@dataclass(frozen=True, slots=True)
class MLPConfig:
    """The dense MLP of one layer: down(activation(gate(x)) * up(x)), or down(activation(up(x))) without a gate."""

    intermediate_size: int
    activation: Activation = "silu"
    has_bias: bool = False
    is_fused: bool = False  # gate and up are one linear in the checkpoint, fused_name
    fused_name: str = "mlp.gate_up_proj"
    gate_name: str | None = "mlp.gate_proj"  # None: there is no gate
    up_name: str = "mlp.up_proj"
    down_name: str = "mlp.down_proj"
    # Share of the gate's numbers that become zero: those below the quantile that a normal distribution with the row's
    # mean and deviation has there. The others are reduced by it.
    sparsity: float = 0.0
    gate_multiplier: float = 1.0  # multiplies the gate before its activation
    out_multiplier: float = 1.0  # multiplies the MLP's output

    def packed(self, hidden_size: int) -> tuple[tuple[Projection, ...], ...]:
        """Returns the projections, grouped into those that one GEMM computes together."""
        hidden, inner = Units(hidden_size), Units(self.intermediate_size)
        down = Projection(self.down_name, inner, (hidden,), self.has_bias, split="inputs")
        if self.is_fused:
            return (Projection(self.fused_name, hidden, (inner, inner), self.has_bias),), (down,)
        names = [name for name in (self.gate_name, self.up_name) if name is not None]
        return tuple(Projection(name, hidden, (inner,), self.has_bias) for name in names), (down,)


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """The names of a layer's norms by their place. None: the layer has no norm there."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None  # norms the attention's output before the residual is added
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None  # norms the MLP's output before the residual is added
    is_parallel: bool = False  # attention and MLP both read the first norm's output, and before_mlp is None

    @property
    def names(self) -> tuple[str, ...]:
        places = self.before_attention, self.after_attention, self.before_mlp, self.after_mlp
        return tuple(name for name in places if name is not None)


NORMS_BEFORE = LayerNorms()
NORMS_AROUND = LayerNorms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
NORMS_AFTER = LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
ONE_NORM = LayerNorms(before_mlp=None, is_parallel=True)


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One layer of the decoder. If ModelConfig.experts has the layer, its experts replace `mlp` or stand beside it.

    A layer with one half alone, as Nemotron-H has them, has its norm in LayerNorms.before_attention.
    """

    mixer: AnyAttention | Recurrence | ParallelMixerConfig | None  # None: the layer has an MLP or experts alone
    mlp: MLPConfig | None  # None: the layer has no dense MLP
    norms: LayerNorms = NORMS_BEFORE
    # Name of a number in the checkpoint that multiplies the residual behind the layer; None: there is none.
    scalar_name: str | None = None

    @property
    def own_attention(self) -> AnyAttention | None:
        """The layer's attention, or None if it has none."""
        mixer = self.mixer
        if isinstance(mixer, ParallelMixerConfig):
            return mixer.attention
        return mixer if isinstance(mixer, AnyAttention) else None

    @property
    def attention(self) -> AnyAttention:
        """The attention of a layer that is known to have one."""
        attention = self.own_attention
        assert attention is not None
        return attention

    @property
    def recurrence(self) -> Recurrence | None:
        """The part of the layer that has a state, or None if it has none."""
        mixer = self.mixer
        if isinstance(mixer, ParallelMixerConfig):
            return mixer.mamba
        return mixer if isinstance(mixer, Recurrence) else None
