"""Defines the few forms in which the engine serves an adapter's changes of its base.

workers/adapters/kinds/ turns every kind of adapter into these forms, and later code does not depend on the kind. All
values are whole (not one tensor-parallel rank's part), on the CPU, and as exact as the files allow. Matrices have the
dtype in which they were stored, or float32 if they were computed. lora_model.py casts them and takes a rank's part.
"""

# R LoRA rank · D in features · O out features · V vocabulary · N rows · E experts · G groups of projections
# P projections · L labels

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from lorafleet.protocol.messages import HeadTask
from lorafleet.workers.adapters.expert_factors import ExpertFactors
from lorafleet.workers.bases.rope_config import RopeConfig


@dataclass(frozen=True, slots=True)
class LowRank:
    """Adds scaling * B A to a weight. The scaling is stored separately, since multiplying it in would round B."""

    a_RD: Tensor
    b_OR: Tensor
    scaling: float = 1.0

    @property
    def rank(self) -> int:
        return self.b_OR.shape[1]


@dataclass(frozen=True, slots=True)
class Kronecker:
    """Adds scaling * (w1 (x) w2) to a weight, where output o1 * O2 + o2 reads input d1 * D2 + d2.

    Its rank is too high for A and B, but it takes few bytes.
    """

    w1: Tensor  # [O1, D1]
    w2: Tensor  # [O2, D2]
    scaling: float = 1.0


@dataclass(frozen=True, slots=True)
class LinearForm:
    """A projection with its adapter computes y = out_scale * ((W + dW) x) + bias, where dW is low_rank or kronecker.

    DoRA has out_scale alone. IA3 scales the base's bias too, so it has both out_scale and bias.
    """

    low_rank: LowRank | None = None
    kronecker: Kronecker | None = None
    out_scale_O: Tensor | None = None  # float32; None means 1
    bias_O: Tensor | None = None  # float32, replaces the base's bias; None: the base's bias, not scaled


@dataclass(frozen=True, slots=True)
class StackedLowRank:
    """The low-rank changes of all experts of a layer. Their outputs are those of P projections, one after another.

    Each projection may have an A of its own (G = P), or all share one (G = 1). Expert e adds
    scaling_EG[e, g] * b_EPOR[e, p] a_EGRD[e, g] to projection p.
    """

    a_EGRD: ExpertFactors
    b_EPOR: ExpertFactors
    scaling_EG: Tensor  # float32

    @property
    def rank(self) -> int:
        return self.b_EPOR.shape[3]

    @property
    def num_values(self) -> int:
        return self.a_EGRD.num_values + self.b_EPOR.num_values


@dataclass(frozen=True, slots=True)
class ExpertsForm:
    """The changes of one mixture of experts."""

    gate_up: StackedLowRank | None = None  # outputs: gate_proj's (if there is one), then up_proj's; one A if G = 1
    down: StackedLowRank | None = None

    @property
    def stacks(self) -> list[StackedLowRank]:
        return [stack for stack in (self.gate_up, self.down) if stack is not None]


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows of an embedding or head that replace the base's."""

    token_N: Tensor  # int64, ascending, distinct
    row_ND: Tensor


@dataclass(frozen=True, slots=True)
class VocabForm:
    """The changes of the embedding or the head. low_rank is added after table_VD and rows have replaced values."""

    low_rank: LowRank | None = None  # embedding: A is [R, V] and B [D, R]; head: A is [R, D] and B [V, R]
    table_VD: Tensor | None = None  # replaces the base's table; may have more or fewer rows
    rows: TokenRows | None = None  # replaces some rows of the table
    bias_V: Tensor | None = None  # float32, of the head only


@dataclass(frozen=True, slots=True)
class OwnRope:
    """The angles and the context of an adapter's tokens, as far as they are not the base's."""

    rope: RopeConfig | None = None  # replaces BaseLayout.rope
    context_length: int | None = None  # most tokens of a prompt and its answer together


BASE_ROPE = OwnRope()


@dataclass(frozen=True, slots=True)
class ClassifierForm:
    """An adapter's own classification head, which is applied to the hidden states after the last norm."""

    task: HeadTask
    weight_LD: Tensor  # float32 [labels, hidden size]
    bias_L: Tensor | None  # float32

    @property
    def num_bytes(self) -> int:
        return self.weight_LD.nbytes + (0 if self.bias_L is None else self.bias_L.nbytes)


@dataclass(frozen=True, slots=True)
class AdapterForms:
    """All changes that one adapter makes. Modules are named as in the base, without "model.".

    Embedding and head have separate forms. If the base ties the two, a form for only one of them unties them.
    """

    linears: Mapping[str, LinearForm] = field(default_factory=dict)  # such as "layers.0.self_attn.q_proj"
    embedding: VocabForm | None = None
    head: VocabForm | None = None
    # Weights [D] that replace those of "layers.0.input_layernorm", "layers.0.self_attn.q_norm" or "norm".
    norms: Mapping[str, Tensor] = field(default_factory=dict)
    experts: Mapping[str, ExpertsForm] = field(default_factory=dict)  # such as "layers.0.mlp.experts"
    own_rope: OwnRope = BASE_ROPE
    # An activated LoRA (aLoRA) acts from the last occurrence of these tokens in the prompt on.
    invocation_tokens: tuple[int, ...] = ()
    classifier: ClassifierForm | None = None
    left_out: tuple[str, ...] = ()  # parts of the adapter that no text passes through, such as "visual"

    @property
    def changes_nothing(self) -> bool:
        tables = self.embedding, self.head, self.classifier
        return not (self.linears or self.norms or self.experts) and all(table is None for table in tables)
