"""Describes a whole decoder: its layers, and what stands before and behind them.

workers/bases/checkpoint.py reads it from a config.json, with the help of the families.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from lorafleet.workers.bases.altup_config import LAUREL_NORM, ROUTER_NORM, AltUpConfig
from lorafleet.workers.bases.experts_config import ExpertsConfig
from lorafleet.workers.bases.layer_config import AnyAttention, AttentionConfig, LayerConfig
from lorafleet.workers.bases.module_names import COMMON_NAMES, ModuleNames
from lorafleet.workers.bases.mtp_config import MTPConfig
from lorafleet.workers.bases.per_layer_config import OUT_NORM, PROJECTION_NORM, PerLayerConfig
from lorafleet.workers.bases.projection import Projection
from lorafleet.workers.bases.quantization import Quantization
from lorafleet.workers.bases.recurrence_config import StateShape
from lorafleet.workers.bases.rope_config import RopeConfig
from lorafleet.workers.bases.stored_names import AS_WRITTEN, StoredNames


@dataclass(frozen=True, slots=True)
class NormStyle:
    """The kind of all norms of a model."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"  # "layer": the mean is subtracted first
    has_weight: bool = True  # False: the checkpoint has no weights of norms, which are all ones
    has_bias: bool = False
    adds_one: bool = False  # the checkpoint stores weights minus one


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The settings of a decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    norm: NormStyle
    max_position_embeddings: int
    tie_word_embeddings: bool  # the head is the embedding, as stored_tables.py decides it by the tensors
    dtype: torch.dtype | None  # the checkpoint's own; None if config.json does not say
    eos_token_ids: tuple[int, ...] = ()  # from generation_config.json if it has them, else from config.json
    experts: ExpertsConfig | None = None  # None if every layer's MLP is dense
    altup: AltUpConfig | None = None  # None if there is one residual stream
    per_layer: PerLayerConfig | None = None  # None if tokens have no vectors for each layer
    final_norm: str = "norm"  # module path of the norm behind the last layer
    embed_scale: float = 1.0  # multiplies the embedding, once rounded to the model's dtype
    residual_scale: float = 1.0  # multiplies the outputs of attention and MLP before they are added to the residual
    logits_scale: float = 1.0  # multiplies the logits
    final_softcap: float | None = None  # bounds the logits, see LayerAttention.softcap
    head_bias: bool = False
    is_only_called_tied: bool = False  # config.json calls head and embedding tied, and the files have two that differ
    has_head: bool = True  # False: the checkpoint has none, so the model cannot generate
    stored_names: StoredNames = AS_WRITTEN  # how names in this checkpoint's files differ from the class's own
    is_text_part: bool = False  # the checkpoint has a part for pictures too
    names: ModuleNames = COMMON_NAMES  # those of the checkpoint's and adapters' modules
    # Beginnings of the names of tensors that predict more than the next token. They do not belong to the decoder.
    mtp_names: tuple[str, ...] = ()
    mtp: MTPConfig | None = None  # the layer that they make; None if there is none, or none that can draft
    quantization: Quantization | None = None  # None if all weights are in dtype

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attentions(self) -> tuple[AnyAttention, ...]:
        """The attention of each layer that has one."""
        return tuple(layer.own_attention for layer in self.layers if layer.own_attention is not None)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that have attention."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.own_attention is not None)

    @property
    def states(self) -> tuple[StateShape, ...]:
        """The state of each recurrent layer, or nothing if all layers have attention."""
        return tuple(layer.recurrence.state for layer in self.layers if layer.recurrence is not None)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """The layers that have a state."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.recurrence is not None)

    @property
    def rope(self) -> RopeConfig:
        """The rope on which the reuse of cached keys depends: of the layers that rotate, one that depends on the length
        if there is any."""
        ropes = [attention.rope for attention in self.attentions if attention.rope is not None]
        return next((rope for rope in ropes if rope.depends_on_length), ropes[0] if ropes else self._no_rope)

    @property
    def adapters_rope(self) -> RopeConfig | None:
        """The rope that an adapter's own rope scaling replaces, or None if adapters cannot have one.

        If layers have different ropes, it is that of the layers that see all tokens: scaling is for long distances. The
        scale of latent attention depends on the scaling too, so it cannot be replaced there.
        """
        rotating = [(a.rope, a.window) for a in self.attentions if isinstance(a, AttentionConfig)]
        ropes = {rope for rope, _ in rotating if rope is not None and not rope.is_local}
        if len(ropes) > 1:
            ropes = {rope for rope, window in rotating if rope is not None and window is None}
        rope = ropes.pop() if len(ropes) == 1 else None
        if rope is None or rope.depends_on_length or rope.rope_type == "proportional":
            return None
        is_in_theta = rope.rope_type == "default" and rope.factor != 1.0  # the theta without scaling is not known here
        return None if is_in_theta else rope

    @property
    def rope_positions(self) -> int:
        """The number of tokens that a rope without scaling would be for. Adapters' scalings extend it."""
        limit, rope = self.max_position_embeddings, self.adapters_rope
        has_others = len({attention.rope for attention in self.attentions if attention.rope is not None}) > 1
        is_included = has_others and rope is not None and rope.rope_type == "linear"  # as in context_limit
        return int(limit / rope.factor) if is_included and rope is not None else limit

    @property
    def _no_rope(self) -> RopeConfig:
        return RopeConfig(0, 1.0, self.max_position_embeddings)

    def norm_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype of the norms' weights in a model of `dtype`.

        It is float32 if the checkpoint stores them minus one, since `dtype` might not hold what is added to one.
        """
        return torch.float32 if self.norm.adds_one else dtype

    @property
    def context_limit(self) -> int:
        """The number of tokens that the rope scalings were made for."""
        ropes = {attention.rope for attention in self.attentions if attention.rope is not None}
        limit = self.max_position_embeddings
        for rope in ropes:
            if rope.rope_type == "yarn":
                limit = max(limit, int(rope.original_max_position_embeddings * rope.factor))
            # If layers have different ropes, max_position_embeddings includes the scaling, as in Gemma 3.
            if rope.rope_type in ("linear", "dynamic") and len(ropes) == 1:
                limit = int(limit * rope.factor)
        return limit

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """Returns the layer's experts, or None if its MLP is dense."""
        return self.experts if self.experts is not None and layer in self.experts.layers else None

    def packed_projections(self, layer: int) -> tuple[tuple[Projection, ...], ...]:
        """Returns the layer's linears, each with the projections that it computes together. For a mixture of experts,
        this includes the router and the shared expert only."""
        hidden, experts = self.hidden_size, self.experts_of(layer)
        mixer, mlp = self.layers[layer].mixer, self.layers[layer].mlp
        packed = () if mixer is None else mixer.packed(hidden)
        if mlp is not None and (experts is None or experts.beside is not None):
            packed += mlp.packed(hidden)
        if experts is not None:
            packed += experts.packed(hidden)
        if self.per_layer is not None:
            packed += self.per_layer.packed(hidden)
        return packed if self.altup is None else packed + self.altup.packed(hidden)

    def projections_outside(self) -> tuple[Projection, ...]:
        """Returns the linears that belong to no layer, except the head. Each is computed by a GEMM of its own."""
        found: tuple[Projection, ...] = ()
        if self.per_layer is not None:
            found += (self.per_layer.model_projection(self.hidden_size, self.num_layers),)
        return found if self.altup is None else found + self.altup.projections_outside(self.hidden_size)

    @property
    def absent_modules(self) -> frozenset[str]:
        """Module paths whose tensors in checkpoints and adapters have no effect, see AttentionConfig.absent."""
        return frozenset(
            f"layers.{i}.{name}"
            for i, layer in enumerate(self.layers)
            if isinstance(layer.mixer, AttentionConfig)
            for name in layer.mixer.absent
        )

    def projections(self) -> dict[str, Projection]:
        """Returns every projection that plain LoRA may target, by module path below the model.

        expert_shapes() has the projections of the experts.
        """
        of_layers = {
            f"layers.{i}.{projection.name}": projection
            for i in range(self.num_layers)
            for group in self.packed_projections(i)
            for projection in group
        }
        return of_layers | {projection.name: projection for projection in self.projections_outside()}

    def expert_shapes(self) -> dict[str, tuple[int, int]]:
        """Returns (in, out) of each expert's projections, or nothing if there are no experts."""
        return {} if self.experts is None else self.experts.expert_shapes(self.hidden_size)

    def norm_sizes(self) -> dict[str, int]:
        """Returns the size of every norm that has a weight, by module path below the model."""
        if not self.norm.has_weight:
            return {}
        sizes = {self.final_norm: self.hidden_size}
        for i, layer in enumerate(self.layers):
            experts, names = self.experts_of(i), layer.norms.names
            if experts is not None and experts.beside is not None:
                names += experts.beside.norms
            if self.per_layer is not None:
                names += (OUT_NORM,)
            if self.altup is not None:
                names += (ROUTER_NORM, LAUREL_NORM)
            sizes |= {f"layers.{i}.{name}": self.hidden_size for name in names}
            if layer.mixer is not None:
                sizes |= {f"layers.{i}.{name}": size for name, size in layer.mixer.norm_sizes().items()}
        return sizes if self.per_layer is None else sizes | {PROJECTION_NORM: self.per_layer.size}
